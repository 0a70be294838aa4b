//! The tests load models through llama.cpp: its calls of these functions go to
//! `pinscope_host::wrap`, which keeps the whole file from being read at load.

fn main() {
    for function in ["mmap", "posix_madvise", "posix_fadvise"] {
        println!("cargo:rustc-link-arg-tests=-Wl,--wrap={function}");
    }
}
