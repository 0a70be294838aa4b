//! `libggml_pinscope.so`: PinScope in llama.cpp programs that know nothing of it.
//!
//! ```text
//! GGML_BACKEND_PATH=/path/libggml_pinscope.so PINSCOPE_RAM=10G llama-server -m model.gguf
//! ```
//!
//! ggml loads the library and calls [`ggml_backend_init`]. From then on the
//! device of `pinscope-ggml` asks the [`guide`] what to do: it finds the model
//! that is being loaded among the files that the process has open
//! ([`discover`]), and gives experts what [`budget`] leaves of `PINSCOPE_RAM`
//! at the first computation. Whatever does not fit, from a ggml of another
//! version to a dense model, leaves the program as it would be without us.

mod budget;
mod discover;
mod guide;
mod mapped;
mod preload;
mod quiet;
mod settings;
mod symbols;

use std::ffi::c_void;
use std::sync::Once;

use guide::PluginGuide;
use settings::Settings;
use symbols::Symbols;

/// Tells the user something; the program's log is not ours.
fn say(text: &str) {
    eprintln!("PinScope: {text}");
}

/// ggml's entry point of a backend library: a `ggml_backend_reg_t`, or null
/// where PinScope cannot work, which ggml reports and goes on from.
#[no_mangle]
pub extern "C" fn ggml_backend_init() -> *mut c_void {
    preload::note_loaded();
    let settings = match Settings::from_environment() {
        Ok(settings) => settings,
        Err(reason) => {
            say(&format!("{reason}. The program runs without PinScope"));
            return std::ptr::null_mut();
        }
    };
    let symbols = Symbols::of_this_process();
    match pinscope_ggml::serve(&|name| symbols.find(name), Box::new(PluginGuide::new(settings))) {
        Ok(reg) => {
            static ONCE: Once = Once::new();
            // SAFETY: the library stays loaded until the process ends.
            ONCE.call_once(|| unsafe {
                libc::atexit(at_exit);
            });
            reg
        }
        Err(e) => {
            say(&format!("{e}. The program runs without PinScope"));
            std::ptr::null_mut()
        }
    }
}

extern "C" fn at_exit() {
    pinscope_ggml::end();
}
