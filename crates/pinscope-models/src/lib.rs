//! Model files for tests and benchmarks: synthetic shapes, sparse upcycling and
//! routing statistics.

mod disk;
mod error;
pub mod gguf;
mod kmeans;
mod model_file;
pub mod routing;
mod states;
pub mod synth;
mod tokens;
pub mod upcycle;

pub use error::Error;
pub use model_file::Progress;
pub use tokens::TEXT;
