//! A loaded model: its vocabulary, its metadata, its text in and out.

use crate::{last_errors, wrap, HostError, Token};
use llama_cpp_sys_2 as sys;
use std::ffi::{c_char, c_void, CStr, CString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

/// How to load a model. The default is what PinScope needs: mapped, not
/// repacked, nothing read that is not used.
pub struct ModelOptions<'a> {
    /// Let ggml copy weights into another layout (llama.cpp's default). Faster
    /// to decode, other bits, and not for weights that come from disk.
    pub repack: bool,
    /// Let llama.cpp read the whole file at load, as it does by itself. Needs
    /// the link arguments of [`wrap`] to have an effect when false.
    pub read_ahead: bool,
    /// Read the header only and allocate nothing; such a model can only be
    /// measured.
    pub no_alloc: bool,
    /// Read the vocabulary only; such a model can tokenize, not decode.
    pub vocab_only: bool,
    /// Map the file instead of reading it into memory.
    pub use_mmap: bool,
    /// Called with 0.0 to 1.0 while loading; false cancels.
    pub progress: Option<&'a mut dyn FnMut(f32) -> bool>,
}

impl Default for ModelOptions<'_> {
    fn default() -> Self {
        ModelOptions {
            repack: false,
            read_ahead: false,
            no_alloc: false,
            vocab_only: false,
            use_mmap: true,
            progress: None,
        }
    }
}

/// A model in memory (or mapped).
#[derive(Debug)]
pub struct Model {
    ptr: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
    loaded: Loaded,
}

/// How much of a model is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loaded {
    Weights,
    Vocabulary,
    Skeleton,
}

// SAFETY: a loaded llama_model is only read by the calls of this crate, and
// llama.cpp allows contexts on several threads to share one.
unsafe impl Send for Model {}
// SAFETY: as above.
unsafe impl Sync for Model {}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: the pointer is ours and contexts borrow the model, so none is left.
        unsafe { sys::llama_model_free(self.ptr.as_ptr()) }
    }
}

unsafe extern "C" fn on_progress(done: f32, user: *mut c_void) -> bool {
    // SAFETY: `user` points to the `progress` local of `load`, which lives on
    // the stack of the caller of llama.cpp.
    let call = unsafe { &mut *user.cast::<&mut dyn FnMut(f32) -> bool>() };
    call(done)
}

impl Model {
    /// Loads a GGUF file, or the first part of one that is split.
    ///
    /// # Errors
    /// [`HostError::Load`] for a file that is missing, unreadable, not a GGUF
    /// or refused by llama.cpp; [`HostError::Cancelled`] if `progress` said so.
    pub fn load(path: &Path, options: ModelOptions) -> Result<Model, HostError> {
        Self::load_with(path, options, std::ptr::null())
    }

    /// The same with `overrides` of metadata: null, or a list up to an empty key.
    pub(crate) fn load_with(
        path: &Path,
        options: ModelOptions,
        overrides: *const sys::llama_model_kv_override,
    ) -> Result<Model, HostError> {
        crate::init();
        let load_error = |reason: String| HostError::Load { path: path.to_owned(), reason };
        check_is_gguf(path).map_err(load_error)?;
        let c_path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| load_error("the path contains a NUL byte".into()))?;

        // SAFETY: returns a plain struct.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.n_gpu_layers = 0;
        params.use_extra_bufts = options.repack;
        params.vocab_only = options.vocab_only;
        params.no_alloc = options.no_alloc;
        params.kv_overrides = overrides;
        // llama.cpp asserts that a model without allocations is not mapped.
        params.load_mode = if options.use_mmap && !options.no_alloc {
            sys::LLAMA_LOAD_MODE_MMAP
        } else {
            sys::LLAMA_LOAD_MODE_NONE
        };
        let mut cancelled = false;
        let mut user = options.progress;
        let mut watch = |done: f32| {
            let go_on = user.as_mut().is_none_or(|call| call(done));
            cancelled |= !go_on;
            go_on
        };
        let mut progress: &mut dyn FnMut(f32) -> bool = &mut watch;
        params.progress_callback = Some(on_progress);
        params.progress_callback_user_data = (&raw mut progress).cast();

        last_errors();
        let ptr = {
            let _quiet = (!options.read_ahead).then(wrap::Quiet::new);
            // SAFETY: the path is NUL-terminated and both it and `progress`
            // outlive the call; llama.cpp catches its own exceptions here.
            NonNull::new(unsafe { sys::llama_model_load_from_file(c_path.as_ptr(), params) })
        };
        let Some(ptr) = ptr else {
            if cancelled {
                return Err(HostError::Cancelled);
            }
            return Err(load_error(refusal(&last_errors())));
        };
        // SAFETY: the model is valid; its vocabulary lives as long as it does.
        let vocab = unsafe { sys::llama_model_get_vocab(ptr.as_ptr()) };
        let Some(vocab) = NonNull::new(vocab.cast_mut()) else {
            // SAFETY: ours, and nothing refers to it yet.
            unsafe { sys::llama_model_free(ptr.as_ptr()) };
            return Err(load_error("it has no vocabulary".into()));
        };
        let loaded = match (options.vocab_only, options.no_alloc) {
            (false, false) => Loaded::Weights,
            (true, _) => Loaded::Vocabulary,
            (false, true) => Loaded::Skeleton,
        };
        Ok(Model { ptr, vocab, loaded })
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::llama_model {
        self.ptr.as_ptr()
    }

    /// False for a model that was loaded without its weights.
    pub(crate) fn can_decode(&self) -> bool {
        self.loaded == Loaded::Weights
    }

    /// True for a model whose tensors are known and not allocated.
    pub(crate) fn is_skeleton(&self) -> bool {
        self.loaded == Loaded::Skeleton
    }

    /// Tokens in the vocabulary, which is also the width of a row of logits.
    pub fn n_vocab(&self) -> usize {
        // SAFETY: the vocabulary is valid.
        unsafe { sys::llama_vocab_n_tokens(self.vocab.as_ptr()) }.max(0) as usize
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        // SAFETY: the model is valid.
        unsafe { sys::llama_model_n_layer(self.as_ptr()) }.max(0) as usize
    }

    /// Width of the hidden state.
    pub fn n_embd(&self) -> usize {
        // SAFETY: the model is valid.
        unsafe { sys::llama_model_n_embd(self.as_ptr()) }.max(0) as usize
    }

    /// The context that the model was trained for, tokens.
    pub fn n_ctx_train(&self) -> u32 {
        // SAFETY: the model is valid.
        unsafe { sys::llama_model_n_ctx_train(self.as_ptr()) }.max(0) as u32
    }

    /// A scalar of the file's metadata as text, for example
    /// `general.architecture`.
    pub fn meta(&self, key: &str) -> Option<String> {
        let key = CString::new(key).ok()?;
        // SAFETY: the buffer has the length that is given; llama.cpp
        // NUL-terminates within it and returns the full length or -1.
        let value = text_from(|buf, len| unsafe {
            sys::llama_model_meta_val_str(self.as_ptr(), key.as_ptr(), buf, len as usize)
        })?;
        Some(String::from_utf8_lossy(&value).into_owned())
    }

    /// Cuts `text` into tokens.
    ///
    /// `add_special` puts the begin-of-text token in front where the model
    /// wants one; `parse_special` reads control tokens such as `<|im_end|>` in
    /// the text as such (right for a chat template, wrong for a user's text).
    ///
    /// # Errors
    /// [`HostError::Tokenize`] when the model has no usable vocabulary, or the
    /// text is larger than 2 GiB.
    pub fn tokenize(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, HostError> {
        let error = |reason: &str| HostError::Tokenize { reason: reason.to_owned() };
        self.check_vocab(add_special).map_err(error)?;
        let text_len =
            i32::try_from(text.len()).map_err(|_| error("the text is larger than 2 GiB"))?;
        // A token covers at least a byte, but for the few special ones.
        let mut tokens: Vec<Token> = vec![0; text.len() + 8];
        loop {
            let room = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            // SAFETY: pointers and lengths belong together; what would trip an
            // assertion in the tokenizer was excluded by `check_vocab`.
            let n = unsafe {
                sys::llama_tokenize(
                    self.vocab.as_ptr(),
                    text.as_ptr().cast(),
                    text_len,
                    tokens.as_mut_ptr(),
                    room,
                    add_special,
                    parse_special,
                )
            };
            match n {
                i32::MIN => return Err(error("it makes too many tokens")),
                n if n < 0 => tokens.resize(n.unsigned_abs() as usize, 0),
                n => {
                    tokens.truncate(n as usize);
                    return Ok(tokens);
                }
            }
        }
    }

    /// Why the tokenizer must not be called: it asserts instead of failing.
    fn check_vocab(&self, add_special: bool) -> Result<(), &'static str> {
        let vocab = self.vocab.as_ptr();
        // SAFETY: the vocabulary is valid for all of these.
        unsafe {
            if sys::llama_vocab_type(vocab) == sys::LLAMA_VOCAB_TYPE_NONE {
                return Err("the model file has no vocabulary");
            }
            let missing = |wanted: bool, token: Token| add_special && wanted && token < 0;
            if missing(sys::llama_vocab_get_add_bos(vocab), sys::llama_vocab_bos(vocab))
                || missing(sys::llama_vocab_get_add_eos(vocab), sys::llama_vocab_eos(vocab))
            {
                return Err("the model file asks for a begin or end token and names none");
            }
        }
        Ok(())
    }

    /// The bytes that a token stands for; part of a UTF-8 character at times.
    /// Control tokens are empty unless `special`. Empty for a token that the
    /// vocabulary does not have.
    pub fn piece(&self, token: Token, special: bool) -> Vec<u8> {
        if !self.has_token(token) {
            return Vec::new();
        }
        let mut buf = vec![0u8; 64];
        loop {
            // SAFETY: the token is in range and the buffer has the length that is given.
            let n = unsafe {
                sys::llama_token_to_piece(
                    self.vocab.as_ptr(),
                    token,
                    buf.as_mut_ptr().cast(),
                    buf.len() as i32,
                    0,
                    special,
                )
            };
            if n >= 0 {
                buf.truncate(n as usize);
                return buf;
            }
            buf.resize(n.unsigned_abs() as usize, 0);
        }
    }

    /// Whether the token ends an answer (end of text, of turn, of message).
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the vocabulary is valid; any token may be asked.
        self.has_token(token) && unsafe { sys::llama_vocab_is_eog(self.vocab.as_ptr(), token) }
    }

    fn has_token(&self, token: Token) -> bool {
        // SAFETY: the vocabulary is valid.
        let none =
            unsafe { sys::llama_vocab_type(self.vocab.as_ptr()) } == sys::LLAMA_VOCAB_TYPE_NONE;
        !none && usize::try_from(token).is_ok_and(|t| t < self.n_vocab())
    }

    /// The model's own chat template (Jinja source), if the file has one.
    pub fn chat_template(&self) -> Option<String> {
        // SAFETY: the model is valid; a null name asks for the default one.
        let text = unsafe { sys::llama_model_chat_template(self.as_ptr(), std::ptr::null()) };
        if text.is_null() {
            return None;
        }
        // SAFETY: NUL-terminated and owned by the model.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }
}

/// Calls `fill(buffer, length)` until its result fits; `None` if it says -1.
pub(crate) fn text_from(fill: impl Fn(*mut c_char, i32) -> i32) -> Option<Vec<u8>> {
    let mut buf = vec![0u8; 256];
    loop {
        let n = usize::try_from(fill(buf.as_mut_ptr().cast(), buf.len() as i32)).ok()?;
        // One byte more than the text, for the NUL that some of them add.
        if n < buf.len() {
            buf.truncate(n);
            return Some(buf);
        }
        if n >= i32::MAX as usize {
            return None;
        }
        buf.resize(n + 1, 0);
    }
}

pub(crate) fn check_is_gguf(path: &Path) -> Result<(), String> {
    let mut file = std::fs::File::open(path).map_err(|e| e.to_string())?;
    if file.metadata().map_err(|e| e.to_string())?.is_dir() {
        return Err("it is a directory; give the GGUF file in it".into());
    }
    let mut magic = [0u8; 4];
    file.read_exact(&mut magic).map_err(|e| format!("it is not a GGUF file ({e})"))?;
    if &magic != b"GGUF" {
        return Err(format!("it is not a GGUF file: it begins with \"{}\"", magic.escape_ascii()));
    }
    Ok(())
}

fn refusal(log: &str) -> String {
    if log.is_empty() {
        return "llama.cpp refused it without saying why".into();
    }
    format!("llama.cpp says: {log}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(path: &Path) -> String {
        match Model::load(path, ModelOptions::default()) {
            Err(HostError::Load { reason, .. }) => reason,
            other => panic!("expected a load error, got {other:?}"),
        }
    }

    #[test]
    fn bad_files_are_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        assert!(reason(&dir.path().join("none.gguf")).contains("No such file"));
        assert!(reason(dir.path()).contains("directory"));

        let file = dir.path().join("bad.gguf");
        std::fs::write(&file, b"").unwrap();
        assert!(reason(&file).contains("not a GGUF"));
        std::fs::write(&file, b"PK\x03\x04 and so on").unwrap();
        assert!(reason(&file).contains("PK"));
        // The right magic and nothing sensible behind it: llama.cpp's turn.
        std::fs::write(&file, b"GGUF\x03\0\0\0garbage").unwrap();
        assert!(reason(&file).contains("llama.cpp says"));
    }

    #[test]
    fn long_values_are_fetched_whole() {
        let text = "x".repeat(1000);
        let fill = |buf: *mut c_char, len: i32| {
            let n = text.len().min(len as usize);
            // SAFETY: at most `len` bytes are written.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), n) };
            text.len() as i32
        };
        assert_eq!(text_from(fill), Some(text.clone().into_bytes()));
        assert_eq!(text_from(|_, _| -1), None);
    }
}
