//! A ggml backend device that keeps the experts of a Mixture-of-Experts model
//! in an arena of fixed size and has ggml's CPU backend compute them.
//!
//! llama.cpp needs no patch: [`Engine::register`] before the model is loaded
//! is all. See `ARCHITECTURE.md` for the flow of a token.

mod api;
mod backend;
mod buffer;
mod device;
mod engine;
mod exec;
mod ffi;
mod gguf;
mod guest;
mod sink;
mod watch;

pub use engine::{Engine, EngineError, EngineOptions};
pub use exec::scratch_bytes;
pub use ffi::Incompatible;
pub use gguf::{read_map, read_open_map, ReadMapError};
pub use guest::{end, serve, Guide};
