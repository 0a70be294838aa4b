//! Decoding: tokens in, logits out.

use crate::{last_errors, HostError, Model, TensorObserver, TensorView, Token};
use llama_cpp_sys_2 as sys;
use std::ffi::{c_void, CStr};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// How to set a context up.
pub struct ContextOptions {
    /// Tokens that it can hold; llama.cpp rounds up to 256.
    pub n_ctx: u32,
    /// Most tokens in one call of [`Context::decode`].
    pub n_batch: u32,
    /// Most tokens computed at once; what compute buffers are sized for.
    pub n_ubatch: u32,
    /// Most logits rows in one call of `decode`; 0 is `n_batch`. A generator
    /// needs 1, which keeps `n_ubatch` times the vocabulary out of the compute
    /// buffer (300 MB for a vocabulary of 150 000).
    pub max_outputs: u32,
    /// Threads for one token.
    pub threads: u32,
    /// Threads for many tokens.
    pub threads_batch: u32,
    /// Stops a running decode with [`HostError::Aborted`] while true.
    pub abort: Option<Arc<AtomicBool>>,
    /// Sees tensors as they are computed.
    pub on_tensor: Option<Box<dyn TensorObserver>>,
}

impl Default for ContextOptions {
    fn default() -> Self {
        ContextOptions {
            n_ctx: 4096,
            n_batch: 512,
            n_ubatch: 512,
            max_outputs: 0,
            threads: 1,
            threads_batch: 1,
            abort: None,
            on_tensor: None,
        }
    }
}

/// Which tokens of a batch get a row of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// None of them.
    None,
    /// The last one.
    Last,
    /// Each of them.
    All,
}

/// The state of one conversation: the KV cache and the logits of the last step.
pub struct Context<'m> {
    ptr: NonNull<sys::llama_context>,
    n_vocab: usize,
    n_ctx: u32,
    n_batch: u32,
    max_outputs: u32,
    outputs: usize,
    arrays: Arrays,
    // Both are what the callbacks' user pointers point to.
    _abort: Option<Arc<AtomicBool>>,
    observer: Option<NonNull<Box<dyn TensorObserver>>>,
    _model: PhantomData<&'m Model>,
}

/// What llama.cpp wants to know of each token of a batch; kept, so that a token
/// allocates nothing.
#[derive(Default)]
struct Arrays {
    tokens: Vec<i32>,
    positions: Vec<i32>,
    seq_counts: Vec<i32>,
    seqs: Vec<*mut i32>,
    wanted: Vec<i8>,
}

impl Arrays {
    fn fill(&mut self, tokens: &[Token], pos: u32, logits: Logits, seq: *mut i32) {
        let n = tokens.len();
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.positions.clear();
        self.positions.extend((pos as i32..).take(n));
        self.seq_counts.clear();
        self.seq_counts.resize(n, 1);
        self.seqs.clear();
        self.seqs.resize(n, seq);
        self.wanted.clear();
        self.wanted.resize(n, i8::from(logits == Logits::All));
        if let (Logits::Last, Some(last)) = (logits, self.wanted.last_mut()) {
            *last = 1;
        }
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: the pointer is ours; after it nothing calls the observer, which
        // was leaked by `new`.
        unsafe {
            sys::llama_free(self.ptr.as_ptr());
            free_observer(self.observer);
        }
    }
}

/// # Safety
/// The observer was leaked from a box, and nothing uses it any more.
unsafe fn free_observer(observer: Option<NonNull<Box<dyn TensorObserver>>>) {
    if let Some(observer) = observer {
        // SAFETY: as required above.
        drop(unsafe { Box::from_raw(observer.as_ptr()) });
    }
}

unsafe extern "C" fn on_abort(user: *mut c_void) -> bool {
    // SAFETY: `user` is the atomic inside the Arc that the context holds.
    unsafe { &*user.cast::<AtomicBool>() }.load(Ordering::Relaxed)
}

unsafe extern "C" fn on_eval(t: *mut sys::ggml_tensor, ask: bool, user: *mut c_void) -> bool {
    // SAFETY: `user` is the box that the context holds, used by one decode at a
    // time; `t` is a valid tensor with a NUL-terminated name.
    let (observer, tensor) = unsafe { (&mut *user.cast::<Box<dyn TensorObserver>>(), &*t) };
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(tensor.name.as_ptr()) }.to_string_lossy();
    if ask {
        return observer.wants(&name);
    }
    // SAFETY: the tensor was just computed and has a buffer; its size is asked
    // of ggml, so the copy is exactly as long as the vector.
    let data = unsafe {
        let mut data = vec![0u8; sys::ggml_nbytes(t)];
        sys::ggml_backend_tensor_get(t, data.as_mut_ptr().cast(), 0, data.len());
        data
    };
    let view = TensorView { ty: tensor.type_, ne: tensor.ne, nb: tensor.nb, data };
    observer.observe(&name, &view);
    true
}

/// The parameters without the callbacks.
pub(crate) fn params(o: &ContextOptions) -> sys::llama_context_params {
    // SAFETY: returns a plain struct.
    let mut p = unsafe { sys::llama_context_default_params() };
    p.n_ctx = o.n_ctx;
    p.n_batch = o.n_batch;
    p.n_ubatch = o.n_ubatch;
    p.n_seq_max = 1;
    p.n_outputs_max = o.max_outputs;
    p.n_threads = o.threads.clamp(1, 512) as i32;
    p.n_threads_batch = o.threads_batch.clamp(1, 512) as i32;
    p.no_perf = true;
    p
}

/// A context of llama.cpp, freed by the caller.
pub(crate) fn create(
    model: &Model,
    params: sys::llama_context_params,
) -> Result<NonNull<sys::llama_context>, HostError> {
    let error = |reason: String| HostError::Context { reason };
    if params.n_batch == 0 || params.n_ubatch == 0 {
        return Err(error("batch sizes are at least 1".into()));
    }
    // SAFETY: the model is valid.
    let (encodes, decodes) = unsafe {
        (sys::llama_model_has_encoder(model.as_ptr()), sys::llama_model_has_decoder(model.as_ptr()))
    };
    if encodes || !decodes {
        return Err(error("the model does not generate text from text".into()));
    }
    last_errors();
    // SAFETY: the model is valid; llama.cpp catches its own exceptions here.
    let ptr = NonNull::new(unsafe { sys::llama_init_from_model(model.as_ptr(), params) })
        .ok_or_else(|| error(format!("llama.cpp says: {}", last_errors())))?;
    // SAFETY: the context is valid.
    if unsafe { sys::llama_get_memory(ptr.as_ptr()) }.is_null() {
        // SAFETY: ours, and not used again.
        unsafe { sys::llama_free(ptr.as_ptr()) };
        return Err(error("the model keeps no context; it is not a generator".into()));
    }
    Ok(ptr)
}

impl<'m> Context<'m> {
    /// Allocates a context (KV cache and compute buffers) for `model`.
    ///
    /// # Errors
    /// [`HostError::Context`] when llama.cpp cannot (memory, options), or the
    /// model was loaded without weights.
    pub fn new(model: &'m Model, o: ContextOptions) -> Result<Context<'m>, HostError> {
        if !model.can_decode() {
            return Err(HostError::Context {
                reason: "the model was loaded without its weights".into(),
            });
        }
        let mut params = params(&o);
        if let Some(flag) = &o.abort {
            params.abort_callback = Some(on_abort);
            params.abort_callback_data = Arc::as_ptr(flag).cast_mut().cast();
        }
        let observer = o.on_tensor.map(|o| NonNull::from(Box::leak(Box::new(o))));
        if let Some(observer) = observer {
            params.cb_eval = Some(on_eval);
            params.cb_eval_user_data = observer.as_ptr().cast();
        }
        let ptr = create(model, params).inspect_err(|_| {
            // SAFETY: leaked above, and no context was made that could use it.
            unsafe { free_observer(observer) }
        })?;
        // SAFETY: the context is valid.
        let (n_ctx, n_batch) =
            unsafe { (sys::llama_n_ctx_seq(ptr.as_ptr()), sys::llama_n_batch(ptr.as_ptr())) };
        Ok(Context {
            ptr,
            n_vocab: model.n_vocab(),
            n_ctx,
            n_batch,
            max_outputs: match o.max_outputs {
                0 => n_batch,
                n => n,
            },
            outputs: 0,
            arrays: Arrays::default(),
            _abort: o.abort,
            observer,
            _model: PhantomData,
        })
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::llama_context {
        self.ptr.as_ptr()
    }

    /// Rows of logits that the last decode left.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Tokens that fit.
    pub fn n_ctx(&self) -> u32 {
        self.n_ctx
    }

    /// Most tokens in one call of [`decode`](Self::decode); less than asked for
    /// when the context is smaller.
    pub fn n_batch(&self) -> u32 {
        self.n_batch
    }

    /// Appends `tokens` at position `pos` and computes.
    ///
    /// After an error the positions from `pos` on are forgotten, so the same
    /// call may be tried again.
    ///
    /// # Errors
    /// [`HostError::ContextFull`] when they do not fit, [`HostError::Aborted`]
    /// when stopped, [`HostError::Decode`] for bad arguments and for whatever
    /// llama.cpp or a backend could not do.
    pub fn decode(&mut self, tokens: &[Token], pos: u32, logits: Logits) -> Result<(), HostError> {
        self.outputs = 0;
        self.check(tokens, pos, logits)?;
        let n = tokens.len();
        let mut seq = 0i32;
        let arrays = &mut self.arrays;
        arrays.fill(tokens, pos, logits, &raw mut seq);
        let batch = sys::llama_batch {
            n_tokens: n as i32,
            token: arrays.tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: arrays.positions.as_mut_ptr(),
            n_seq_id: arrays.seq_counts.as_mut_ptr(),
            seq_id: arrays.seqs.as_mut_ptr(),
            logits: arrays.wanted.as_mut_ptr(),
        };
        last_errors();
        // SAFETY: every array has n entries and outlives the call, which copies
        // them; `check` excluded what llama.cpp would assert on.
        let ret = unsafe { sys::llama_decode(self.as_ptr(), batch) };
        if ret != 0 {
            self.truncate(pos);
        }
        match ret {
            0 => {
                self.outputs = self.arrays.wanted.iter().filter(|&&w| w != 0).count();
                Ok(())
            }
            1 => Err(HostError::ContextFull { pos, tokens: n, n_ctx: self.n_ctx }),
            2 => Err(HostError::Aborted),
            code => Err(HostError::Decode {
                reason: format!("llama.cpp says: {} (code {code})", last_errors()),
            }),
        }
    }

    fn check(&self, tokens: &[Token], pos: u32, logits: Logits) -> Result<(), HostError> {
        let error = |reason: String| Err(HostError::Decode { reason });
        if tokens.is_empty() || tokens.len() > self.n_batch as usize {
            let n = tokens.len();
            return error(format!("1 to {} tokens at a time, not {n}", self.n_batch));
        }
        if logits == Logits::All && tokens.len() > self.max_outputs as usize {
            let max = self.max_outputs;
            return error(format!("the context was made for {max} rows of logits"));
        }
        if let Some(t) =
            tokens.iter().find(|&&t| usize::try_from(t).map_or(true, |t| t >= self.n_vocab))
        {
            return error(format!("token {t} is not in the vocabulary"));
        }
        if pos as usize + tokens.len() > self.n_ctx as usize {
            return Err(HostError::ContextFull { pos, tokens: tokens.len(), n_ctx: self.n_ctx });
        }
        Ok(())
    }

    /// The logits of the i-th output of the last decode, one for each token of
    /// the vocabulary; empty if there is no such output.
    pub fn logits(&self, i: usize) -> &[f32] {
        if i >= self.outputs {
            return &[];
        }
        // SAFETY: the context is valid; the rows of all outputs lie one after
        // the other, in the order of the batch, until the next decode, which
        // needs `&mut self`.
        unsafe {
            let all = sys::llama_get_logits(self.as_ptr());
            if all.is_null() {
                return &[];
            }
            std::slice::from_raw_parts(all.add(i * self.n_vocab), self.n_vocab)
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.outputs = 0;
        // SAFETY: the context is valid and has a memory (checked by `create`).
        unsafe { sys::llama_memory_clear(sys::llama_get_memory(self.as_ptr()), true) }
    }

    /// Forgets the positions from `from` on. False if this model cannot (a
    /// recurrent state); then [`clear`](Self::clear) and start again.
    pub fn truncate(&mut self, from: u32) -> bool {
        self.outputs = 0;
        let from = from.min(self.n_ctx) as i32;
        // SAFETY: the context is valid and has a memory (checked by `create`).
        unsafe { sys::llama_memory_seq_rm(sys::llama_get_memory(self.as_ptr()), 0, from, -1) }
    }
}
