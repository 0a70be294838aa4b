//! Finds ggml's functions in the process that has loaded us.
//!
//! Most programs show them to every library. Where ggml's CPU part is a
//! library of its own (`GGML_BACKEND_DL`), or llama.cpp as a whole was loaded
//! by an interpreter, they are visible only through a handle of that library.

use std::collections::BTreeSet;
use std::ffi::{c_void, CStr, CString};

/// Where to look.
pub struct Symbols {
    /// Handles of ggml's libraries; never closed.
    libraries: Vec<*mut c_void>,
}

impl Symbols {
    /// All that this process has loaded.
    pub fn of_this_process() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let libraries = ggml_libraries(&maps)
            .into_iter()
            .filter_map(|path| CString::new(path).ok())
            .map(|path| {
                // SAFETY: a terminated path; NOLOAD runs no code of the library.
                unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
            })
            .filter(|handle| !handle.is_null())
            .collect();
        Self { libraries }
    }

    /// Address of a function, null where there is none.
    pub fn find(&self, name: &CStr) -> *mut c_void {
        std::iter::once(libc::RTLD_DEFAULT)
            .chain(self.libraries.iter().copied())
            // SAFETY: live handles and a terminated name.
            .map(|handle| unsafe { libc::dlsym(handle, name.as_ptr()) })
            .find(|address| !address.is_null())
            .unwrap_or(std::ptr::null_mut())
    }
}

/// Paths of the mapped libraries that are ggml's or llama.cpp's.
fn ggml_libraries(maps: &str) -> BTreeSet<&str> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .filter(|path| {
            let name = path.rsplit('/').next().unwrap_or("");
            name.contains(".so") && ["libggml", "libllama"].iter().any(|lib| name.starts_with(lib))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_ggml_are_recognised_whatever_their_version_or_variant() {
        let maps = "\
7f00-7f01 r--p 00000000 08:01 11 /opt/my llama/libggml-cpu-haswell.so
7f01-7f02 r-xp 00001000 08:01 11 /opt/my llama/libggml-cpu-haswell.so
7f03-7f04 r-xp 00001000 08:01 12 /usr/lib/libggml-base.so.0.26.0
7f05-7f06 r-xp 00001000 08:01 13 /usr/lib/libc.so.6
7f07-7f08 rw-p 00000000 00:00 0
7f09-7f0a r--s 00000000 08:01 14 /models/libggml.gguf
";
        let found: Vec<_> = ggml_libraries(maps).into_iter().collect();
        assert_eq!(
            found,
            ["/opt/my llama/libggml-cpu-haswell.so", "/usr/lib/libggml-base.so.0.26.0"]
        );
    }

    #[test]
    fn what_the_process_has_is_found_and_what_it_lacks_is_null() {
        let symbols = Symbols::of_this_process();
        assert!(!symbols.find(c"malloc").is_null());
        assert!(symbols.find(c"ggml_no_such_function").is_null());
    }
}
