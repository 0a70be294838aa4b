//! A model without weights and, where that is possible, without its
//! vocabulary: to measure with.
//!
//! llama.cpp needs half a second to read a vocabulary of 150,000 tokens, and
//! cannot hand one that was read to the model that is loaded next.

use crate::{HostError, Model, ModelOptions};
use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};

/// Memory for a token and for a pair of tokens that may be merged, bytes: what
/// the tables of llama.cpp and the header that they are made of take together
/// (strings, nodes and buckets of hash tables): 171 and 135 were measured.
const TOKEN: u64 = 210;
const MERGE: u64 = 160;
/// Tables that do not depend on the vocabulary's size, and rounding.
const TABLES: u64 = 4 << 20;

/// A model that can only be measured.
#[derive(Debug)]
pub struct Skeleton {
    /// Its tensors are known and not allocated; its tokens have no texts.
    pub model: Model,
    /// What the vocabulary will take once it is loaded, bytes, at most; 0 if
    /// it is loaded now.
    pub vocabulary_bytes: u64,
}

impl Skeleton {
    /// Reads the header of the GGUF file at `path`, the first part if there
    /// are several.
    ///
    /// # Errors
    /// [`HostError::Load`], as [`Model::load`].
    pub fn load(path: &Path) -> Result<Skeleton, HostError> {
        crate::init();
        let options = || ModelOptions { no_alloc: true, ..ModelOptions::default() };
        if let Some(vocabulary) = Vocabulary::of(path) {
            let overrides = vocabulary.left_out();
            // Should a model need its vocabulary for more than its size, it
            // gets it.
            if let Ok(model) = Model::load_with(path, options(), overrides.as_ptr()) {
                return Ok(Skeleton { model, vocabulary_bytes: vocabulary.bytes() });
            }
        }
        Ok(Skeleton { model: Model::load(path, options())?, vocabulary_bytes: 0 })
    }
}

/// What the header says of a vocabulary whose cost is known.
struct Vocabulary {
    arch: String,
    tokens: usize,
    merges: usize,
}

impl Vocabulary {
    /// `None` for kinds of vocabularies whose tables were not looked at.
    fn of(path: &Path) -> Option<Vocabulary> {
        let name = CString::new(path.as_os_str().as_bytes()).ok()?;
        let params = sys::gguf_init_params { no_alloc: true, ctx: ptr::null_mut() };
        // SAFETY: the name outlives the call; no tensors are asked for.
        let header = NonNull::new(unsafe { sys::gguf_init_from_file(name.as_ptr(), params) })?;
        let header = Header(header);
        let kind = header.text(c"tokenizer.ggml.model")?;
        matches!(kind.as_str(), "gpt2" | "llama").then_some(())?;
        Some(Vocabulary {
            arch: header.text(c"general.architecture")?,
            tokens: header.count(c"tokenizer.ggml.tokens")?,
            merges: header.count(c"tokenizer.ggml.merges").unwrap_or(0),
        })
    }

    fn bytes(&self) -> u64 {
        TABLES + self.tokens as u64 * TOKEN + self.merges as u64 * MERGE
    }

    /// Says that there is no vocabulary, only its size. The last entry, without
    /// a key, ends the list.
    fn left_out(&self) -> [sys::llama_model_kv_override; 3] {
        let entry = |tag, key: &str, value| {
            let mut name = [0; 128];
            copy(&mut name, key);
            sys::llama_model_kv_override { tag, key: name, __bindgen_anon_1: value }
        };
        let mut none = [0; 128];
        copy(&mut none, "none");
        let none = sys::llama_model_kv_override__bindgen_ty_1 { val_str: none };
        let size = sys::llama_model_kv_override__bindgen_ty_1 { val_i64: self.tokens as i64 };
        [
            entry(sys::LLAMA_KV_OVERRIDE_TYPE_STR, "tokenizer.ggml.model", none),
            entry(sys::LLAMA_KV_OVERRIDE_TYPE_INT, &format!("{}.vocab_size", self.arch), size),
            entry(sys::LLAMA_KV_OVERRIDE_TYPE_INT, "", size),
        ]
    }
}

/// Copies what fits, and leaves a NUL behind it.
fn copy(to: &mut [std::ffi::c_char; 128], text: &str) {
    for (to, &byte) in to[..127].iter_mut().zip(text.as_bytes()) {
        *to = byte as std::ffi::c_char;
    }
}

/// A header as ggml parsed it.
struct Header(NonNull<sys::gguf_context>);

impl Drop for Header {
    fn drop(&mut self) {
        // SAFETY: ours, and not used again.
        unsafe { sys::gguf_free(self.0.as_ptr()) }
    }
}

impl Header {
    /// The position of a key of that type.
    fn find(&self, key: &CStr, kind: sys::gguf_type) -> Option<i64> {
        // SAFETY: the header is alive; the key's type is asked for only if it
        // was found.
        unsafe {
            let at = sys::gguf_find_key(self.0.as_ptr(), key.as_ptr());
            (at >= 0 && sys::gguf_get_kv_type(self.0.as_ptr(), at) == kind).then_some(at)
        }
    }

    fn text(&self, key: &CStr) -> Option<String> {
        let at = self.find(key, sys::GGUF_TYPE_STRING)?;
        // SAFETY: the key is there and a string, NUL-terminated by ggml.
        let text = unsafe { CStr::from_ptr(sys::gguf_get_val_str(self.0.as_ptr(), at)) };
        Some(text.to_string_lossy().into_owned())
    }

    fn count(&self, key: &CStr) -> Option<usize> {
        let at = self.find(key, sys::GGUF_TYPE_ARRAY)?;
        // SAFETY: the key is there and an array.
        Some(unsafe { sys::gguf_get_arr_n(self.0.as_ptr(), at) })
    }
}
