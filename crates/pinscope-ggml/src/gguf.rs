//! Reads the headers of a GGUF model, all its parts, into an [`ExpertMap`].
//!
//! The parsing is ggml's own (`gguf_*`), so this sees exactly what llama.cpp
//! will see. Only headers are read.

use std::ffi::{CStr, CString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pinscope::map::{ExpertMap, MapError, ModelFile, TensorInfo};

use crate::ffi;

/// Why a model's headers could not be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ReadMapError {
    #[error("cannot open {path}: {source}. Give the path of a GGUF file with -m")]
    Open { path: String, source: std::io::Error },
    #[error("{path} is not a GGUF file: it begins with {found:?} instead of \"GGUF\". Give the path of a GGUF model with -m")]
    NotGguf { path: String, found: String },
    #[error("{path} has a damaged header that llama.cpp cannot parse. Download it again")]
    Damaged { path: String },
    #[error(
        "{path} is part {part} of a model in {count} parts. Give the first part with -m: {first}"
    )]
    NotFirst { path: String, part: u32, count: u32, first: String },
    #[error("{path} says that it is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf, so the other parts cannot be found. Give the files their original names")]
    PartName { path: String, count: u32 },
    #[error("part {part} of {count} of the model is missing: {path}: {source}. Put all parts in one folder")]
    MissingPart { path: String, part: u32, count: u32, source: std::io::Error },
    #[error("{path} belongs to another model or download: it calls itself part {part} of {count}, expected part {expected} of {expected_count}. Download it again")]
    WrongPart { path: String, part: u32, count: u32, expected: u32, expected_count: u32 },
    #[error(transparent)]
    Map(#[from] MapError),
}

/// Reads the map of the model at `path`, the first part if it has several.
///
/// # Errors
/// A missing, foreign, truncated or damaged file, a missing part, a dense
/// model; see [`ReadMapError`] and [`MapError`].
pub fn read_map(path: &Path) -> Result<ExpertMap, ReadMapError> {
    let first = Header::open(path)?;
    let count = first.uint("split.count").unwrap_or(0).max(1);
    let number = first.uint("split.no").unwrap_or(0);
    if number != 0 {
        let first = part_path(path, number, 0, count);
        return Err(ReadMapError::NotFirst {
            path: show(path),
            part: number + 1,
            count,
            first: first.map_or_else(|| "…-00001-of-….gguf".into(), |p| show(&p)),
        });
    }
    let arch = first.string("general.architecture").unwrap_or_default();
    let top_k = first.uint(&format!("{arch}.expert_used_count")).unwrap_or(0);
    let mut files = Vec::new();
    let mut tensors = Vec::new();
    first.collect(&mut files, &mut tensors)?;
    for part in 1..count {
        let name = part_path(path, 0, part, count)
            .ok_or_else(|| ReadMapError::PartName { path: show(path), count })?;
        if let Err(source) = std::fs::metadata(&name) {
            let path = show(&name);
            return Err(ReadMapError::MissingPart { path, part: part + 1, count, source });
        }
        let header = Header::open(&name)?;
        let (no, of) =
            (header.uint("split.no").unwrap_or(0), header.uint("split.count").unwrap_or(0));
        if (no, of) != (part, count) {
            return Err(ReadMapError::WrongPart {
                path: show(&name),
                part: no + 1,
                count: of,
                expected: part + 1,
                expected_count: count,
            });
        }
        header.collect(&mut files, &mut tensors)?;
    }
    Ok(ExpertMap::new(files, tensors, top_k)?)
}

fn show(path: &Path) -> String {
    path.display().to_string()
}

/// Name of part `to` (from 0) of a model whose part `from` is `path`.
fn part_path(path: &Path, from: u32, to: u32, count: u32) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&format!("-{:05}-of-{count:05}.gguf", from + 1))?;
    Some(path.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", to + 1)))
}

/// The parsed header of one file.
struct Header {
    path: PathBuf,
    len: u64,
    gguf: *mut ffi::Gguf,
    meta: *mut ffi::Context,
}

impl Drop for Header {
    fn drop(&mut self) {
        // SAFETY: both come from `gguf_init_from_file` and are freed once.
        unsafe {
            ffi::gguf_free(self.gguf);
            ffi::ggml_free(self.meta);
        }
    }
}

/// `GGUF_TYPE_*` of the values that are read here.
mod kv_type {
    pub const UINT16: u32 = 2;
    pub const UINT32: u32 = 4;
    pub const INT32: u32 = 5;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
}

impl Header {
    fn open(path: &Path) -> Result<Self, ReadMapError> {
        let open = |source| ReadMapError::Open { path: show(path), source };
        let mut file = std::fs::File::open(path).map_err(open)?;
        let len = file.metadata().map_err(open)?.len();
        let mut magic = Vec::new();
        file.by_ref().take(4).read_to_end(&mut magic).map_err(open)?;
        if magic != b"GGUF" {
            let found = String::from_utf8_lossy(&magic).into_owned();
            return Err(ReadMapError::NotGguf { path: show(path), found });
        }
        let damaged = || ReadMapError::Damaged { path: show(path) };
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|_| damaged())?;
        let mut meta = std::ptr::null_mut();
        let params = ffi::GgufInitParams { no_alloc: true, ctx: &mut meta };
        // SAFETY: `name` is terminated; ggml writes a context to `meta` and
        // keeps neither pointer. It answers null for a header it cannot parse.
        let gguf = unsafe { ffi::gguf_init_from_file(name.as_ptr(), params) };
        if gguf.is_null() || meta.is_null() {
            return Err(damaged());
        }
        Ok(Self { path: path.to_owned(), len, gguf, meta })
    }

    fn key(&self, key: &str) -> Option<i64> {
        let key = CString::new(key).ok()?;
        // SAFETY: `gguf` is alive, `key` terminated.
        let id = unsafe { ffi::gguf_find_key(self.gguf, key.as_ptr()) };
        (id >= 0).then_some(id)
    }

    /// A non-negative number; the largest one where the header has an array
    /// (one value a layer).
    fn uint(&self, key: &str) -> Option<u32> {
        let id = self.key(key)?;
        // SAFETY: `id` exists, and each value is read as the type that the
        // header gives for it; an array's data has `n` elements of its type.
        unsafe {
            match ffi::gguf_get_kv_type(self.gguf, id) {
                kv_type::UINT16 => Some(ffi::gguf_get_val_u16(self.gguf, id).into()),
                kv_type::UINT32 => Some(ffi::gguf_get_val_u32(self.gguf, id)),
                kv_type::INT32 => u32::try_from(ffi::gguf_get_val_i32(self.gguf, id)).ok(),
                kv_type::ARRAY => {
                    let n = ffi::gguf_get_arr_n(self.gguf, id);
                    let of = ffi::gguf_get_arr_type(self.gguf, id);
                    if n == 0 || !matches!(of, kv_type::UINT32 | kv_type::INT32) {
                        return None;
                    }
                    let data = ffi::gguf_get_arr_data(self.gguf, id).cast::<u32>();
                    std::slice::from_raw_parts(data, n).iter().max().copied()
                }
                _ => None,
            }
        }
    }

    fn string(&self, key: &str) -> Option<String> {
        let id = self.key(key)?;
        // SAFETY: `id` exists and is a string; it lives as long as `gguf`.
        unsafe {
            (ffi::gguf_get_kv_type(self.gguf, id) == kv_type::STRING)
                .then(|| ffi::text(ffi::gguf_get_val_str(self.gguf, id)).to_owned())
        }
    }

    /// Adds this file and its tensors.
    fn collect(
        &self,
        files: &mut Vec<ModelFile>,
        tensors: &mut Vec<TensorInfo>,
    ) -> Result<(), ReadMapError> {
        let damaged = || ReadMapError::Damaged { path: show(&self.path) };
        let file = u16::try_from(files.len()).map_err(|_| damaged())?;
        // SAFETY: `gguf` is alive.
        let data = unsafe { ffi::gguf_get_data_offset(self.gguf) as u64 };
        files.push(ModelFile { path: self.path.clone(), len: self.len, header_len: data });
        // SAFETY: `gguf` and `meta` are alive, indices are below the count,
        // and the name that ggml returns is terminated.
        unsafe {
            for i in 0..ffi::gguf_get_n_tensors(self.gguf) {
                let name = ffi::gguf_get_tensor_name(self.gguf, i);
                let tensor = ffi::ggml_get_tensor(self.meta, name).as_ref().ok_or_else(damaged)?;
                let offset = ffi::gguf_get_tensor_offset(self.gguf, i) as u64;
                tensors.push(TensorInfo {
                    name: CStr::from_ptr(name).to_string_lossy().into_owned(),
                    file,
                    offset: data.saturating_add(offset),
                    size: ffi::gguf_get_tensor_size(self.gguf, i) as u64,
                    ne: tensor.ne.map(|n| u64::try_from(n).unwrap_or(0)),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_split_model_are_found_by_name() {
        let first = Path::new("/m/big-00001-of-00003.gguf");
        assert_eq!(part_path(first, 0, 2, 3), Some("/m/big-00003-of-00003.gguf".into()));
        assert_eq!(part_path(Path::new("/m/big-00002-of-00003.gguf"), 1, 0, 3), Some(first.into()));
        assert_eq!(part_path(Path::new("/m/big.gguf"), 0, 1, 3), None);
    }
}
