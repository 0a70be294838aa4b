//! LoRA adapters: small matrices that llama.cpp adds to a model's own.

use std::ffi::CString;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use llama_cpp_sys_2 as sys;

use crate::model::check_is_gguf;
use crate::{last_errors, Context, HostError, Model};

/// An adapter that was loaded for a model; it lives as long as the model.
#[derive(Debug, Clone, Copy)]
pub struct Lora<'m> {
    ptr: NonNull<sys::llama_adapter_lora>,
    _model: PhantomData<&'m Model>,
}

impl Model {
    /// Loads the adapter at `path` (a GGUF file).
    ///
    /// # Errors
    /// [`HostError::Load`] when the file is no adapter for this model.
    pub fn load_lora(&self, path: &Path) -> Result<Lora<'_>, HostError> {
        let error = |reason: String| HostError::Load { path: path.to_owned(), reason };
        check_is_gguf(path).map_err(error)?;
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| error("its name has a NUL byte".into()))?;
        last_errors();
        // SAFETY: the model is valid, the name terminated; llama.cpp catches
        // its exceptions and frees the adapter with the model.
        let ptr = unsafe { sys::llama_adapter_lora_init(self.as_ptr(), name.as_ptr()) };
        let ptr =
            NonNull::new(ptr).ok_or_else(|| error(format!("llama.cpp says: {}", last_errors())))?;
        Ok(Lora { ptr, _model: PhantomData })
    }
}

impl<'m> Context<'m> {
    /// Applies these adapters, each with its scale, instead of those before.
    ///
    /// # Errors
    /// [`HostError::Context`] when llama.cpp refuses.
    pub fn set_loras(&mut self, loras: &[(Lora<'m>, f32)]) -> Result<(), HostError> {
        let mut adapters: Vec<_> = loras.iter().map(|(l, _)| l.ptr.as_ptr()).collect();
        let mut scales: Vec<_> = loras.iter().map(|&(_, s)| s).collect();
        // SAFETY: the context is valid, and so are the adapters, since they
        // borrow the same model; both lists have `len` entries and are copied.
        let refused = unsafe {
            sys::llama_set_adapters_lora(
                self.as_ptr(),
                adapters.as_mut_ptr(),
                adapters.len(),
                scales.as_mut_ptr(),
            )
        };
        if refused != 0 {
            return Err(HostError::Context {
                reason: format!("llama.cpp says: {}", last_errors()),
            });
        }
        Ok(())
    }
}
