//! pinscope-models
