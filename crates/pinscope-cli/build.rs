//! Sends the calls with which llama.cpp reads a whole model at load through
//! `pinscope_host::wrap`.

fn main() {
    for name in ["mmap", "posix_madvise", "posix_fadvise"] {
        println!("cargo:rustc-link-arg=-Wl,--wrap={name}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
