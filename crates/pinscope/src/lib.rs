//! Residency of experts: which bytes of a Mixture-of-Experts model are in RAM,
//! which are read next, and which give way.
//!
//! This crate is the engine without the arithmetic. It knows files, byte
//! ranges, experts and time; it does not know ggml or llama.cpp.

pub mod arena;
pub mod layout;
pub mod map;
pub mod memory;
pub mod pin;
pub mod plan;
pub mod policy;
pub mod pressure;
pub mod profile;
pub mod reader;
pub mod residency;
pub mod simulate;
mod splitmix;
pub mod timeline;
pub mod trace;
