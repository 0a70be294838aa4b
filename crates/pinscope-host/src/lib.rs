//! pinscope-host
