//! Residency of experts: which bytes of a Mixture-of-Experts model are in RAM,
//! which are read next, and which give way.
//!
//! This crate is the engine without the arithmetic. It knows files, byte
//! ranges, experts and time; it does not know ggml or llama.cpp.

pub mod map;
