//! How the library and its test programs are linked.

fn main() {
    // The library's threads and exit handler outlive `ggml_backend_unload`.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The tests are llama.cpp programs whose ggml the library must find.
    println!("cargo:rustc-link-arg-tests=-rdynamic");
    println!("cargo:rerun-if-changed=build.rs");
}
