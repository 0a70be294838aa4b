//! A safe face for the gguf and quantisation functions that llama.cpp ships.
//!
//! All calls into ggml that this crate makes itself live here.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::ptr;

use llama_cpp_sys_2 as sys;

use crate::error::Error;

/// Number of dimensions that ggml gives every tensor.
const MAX_DIMS: usize = 4;

/// The element type of a tensor: one of ggml's formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorType(sys::ggml_type);

impl TensorType {
    /// 32-bit floats.
    pub const F32: Self = Self(sys::GGML_TYPE_F32);
    /// 16-bit IEEE floats.
    pub const F16: Self = Self(sys::GGML_TYPE_F16);
    /// 8-bit blocks of 32.
    pub const Q8_0: Self = Self(sys::GGML_TYPE_Q8_0);
    /// 4-bit super-blocks of 256.
    pub const Q4_K: Self = Self(sys::GGML_TYPE_Q4_K);
    /// Microscaling 4-bit floats, blocks of 32.
    pub const MXFP4: Self = Self(sys::GGML_TYPE_MXFP4);

    /// 16-bit floats with an 8-bit exponent.
    pub const BF16: Self = Self(sys::GGML_TYPE_BF16);
    /// 4-bit blocks of 32.
    pub const Q4_0: Self = Self(sys::GGML_TYPE_Q4_0);
    /// 2-bit super-blocks of 256.
    pub const Q2_K: Self = Self(sys::GGML_TYPE_Q2_K);
    /// 3-bit super-blocks of 256.
    pub const Q3_K: Self = Self(sys::GGML_TYPE_Q3_K);
    /// 5-bit super-blocks of 256.
    pub const Q5_K: Self = Self(sys::GGML_TYPE_Q5_K);
    /// 6-bit super-blocks of 256.
    pub const Q6_K: Self = Self(sys::GGML_TYPE_Q6_K);
    /// 4-bit super-blocks of 256 with a non-linear grid.
    pub const IQ4_XS: Self = Self(sys::GGML_TYPE_IQ4_XS);

    /// Every type that weights can be written in.
    pub const WRITABLE: [Self; 12] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_XS,
        Self::MXFP4,
    ];

    /// The writable type of that name (`Q4_K`, `f16`, ...), whatever its case.
    ///
    /// # Errors
    /// [`Error::Usage`] with all names when there is none.
    pub fn parse(name: &str) -> Result<Self, Error> {
        let same = |ty: &Self| ty.name().eq_ignore_ascii_case(name);
        Self::WRITABLE.into_iter().find(same).ok_or_else(|| {
            let names = Self::WRITABLE.map(Self::name).join(", ");
            Error::Usage(format!(
                "'{name}' is not a type that can be written; choose one of: {names}"
            ))
        })
    }

    /// ggml's name of the type.
    pub fn name(self) -> String {
        // SAFETY: ggml returns a static string for every type that it knows, and only
        // such types get into `Self`.
        unsafe { CStr::from_ptr(sys::ggml_type_name(self.0)) }.to_string_lossy().into_owned()
    }

    /// Elements in one block: a row's length must be a multiple of it.
    pub fn block(self) -> usize {
        // SAFETY: a table look-up for a known type.
        unsafe { sys::ggml_blck_size(self.0) as usize }
    }

    /// Bytes that `elements` (whole blocks) take.
    pub fn bytes(self, elements: usize) -> usize {
        assert_eq!(elements % self.block(), 0, "whole blocks only");
        // SAFETY: a table look-up for a known type.
        elements / self.block() * unsafe { sys::ggml_type_size(self.0) }
    }

    /// Encodes `values` as consecutive whole blocks.
    ///
    /// # Panics
    /// If `values` is not a whole number of blocks.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        let mut out = vec![0u8; self.bytes(values.len())];
        // SAFETY: source and destination hold exactly one row of `values.len()` elements;
        // no writable type needs an importance matrix.
        let written = unsafe {
            sys::ggml_quantize_chunk(
                self.0,
                values.as_ptr(),
                out.as_mut_ptr().cast(),
                0,
                1,
                values.len() as i64,
                ptr::null(),
            )
        };
        assert_eq!(written, out.len());
        out
    }

    /// Decodes consecutive whole blocks to floats.
    ///
    /// # Panics
    /// If `bytes` is not a whole number of blocks or ggml cannot decode the type.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        if self == Self::F32 {
            let words = bytes.chunks_exact(4);
            assert!(words.remainder().is_empty(), "whole floats only");
            return words.map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
        }
        let elements = bytes.len() / self.bytes(self.block()) * self.block();
        assert_eq!(self.bytes(elements), bytes.len(), "whole blocks only");
        let mut out = vec![0f32; elements];
        // SAFETY: the traits of a known type are static; source and destination hold
        // `elements` elements.
        unsafe {
            let to_float = (*sys::ggml_get_type_traits(self.0)).to_float;
            to_float.expect("a type of weights can be decoded")(
                bytes.as_ptr().cast(),
                out.as_mut_ptr(),
                elements as i64,
            );
        }
        out
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name())
    }
}

/// Name, type and shape of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Its name in the file, such as `blk.0.ffn_up_exps.weight`.
    pub name: String,
    /// Its element type.
    pub ty: TensorType,
    /// Its extents, fastest first (`[row length, rows, ...]`).
    pub ne: Vec<u64>,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.ne.iter().product::<u64>() as usize
    }

    /// Size of the data in bytes, without padding.
    pub fn bytes(&self) -> usize {
        self.ty.bytes(self.elements())
    }
}

/// A value in a GGUF header.
#[derive(Clone, Debug)]
pub enum Value {
    /// `u16`
    U16(u16),
    /// `u32`
    U32(u32),
    /// `i32`
    I32(i32),
    /// `f32`
    F32(f32),
    /// `bool`
    Bool(bool),
    /// A string.
    Str(String),
    /// An array of strings.
    Strs(Vec<String>),
    /// An array of `i32`.
    I32s(Vec<i32>),
}

/// A GGUF header: key-value pairs and tensor descriptions, no tensor data.
pub struct Header(*mut sys::gguf_context);

fn c_string(text: &str) -> CString {
    CString::new(text).expect("GGUF keys and texts hold no NUL byte")
}

impl Default for Header {
    fn default() -> Self {
        // SAFETY: no preconditions; the context is freed in `drop`.
        Self(unsafe { sys::gguf_init_empty() })
    }
}

impl Header {
    /// Reads the header of one file.
    ///
    /// # Errors
    /// When the file cannot be read or is not a whole GGUF header.
    pub fn open(path: &Path) -> Result<Self, Error> {
        std::fs::File::open(path).map_err(|e| Error::read(path, e))?;
        let name = CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| Error::bad_model(path, "the path holds a NUL byte"))?;
        let params = sys::gguf_init_params { no_alloc: true, ctx: ptr::null_mut() };
        // SAFETY: `name` outlives the call; the result is checked.
        let context = unsafe { sys::gguf_init_from_file(name.as_ptr(), params) };
        if context.is_null() {
            return Err(Error::bad_model(
                path,
                "not a GGUF file, or its header is damaged; expected a complete .gguf file",
            ));
        }
        Ok(Self(context))
    }

    /// Takes over all key-value pairs of `other`.
    pub fn copy_values(&mut self, other: &Header) {
        // SAFETY: both contexts are alive and distinct.
        unsafe { sys::gguf_set_kv(self.0, other.0) }
    }

    /// Sets or replaces one key.
    pub fn set(&mut self, key: &str, value: &Value) {
        let key = c_string(key);
        let (context, key) = (self.0, key.as_ptr());
        // SAFETY: the context is alive, and every pointer outlives its call; ggml copies.
        unsafe {
            match value {
                Value::U16(v) => sys::gguf_set_val_u16(context, key, *v),
                Value::U32(v) => sys::gguf_set_val_u32(context, key, *v),
                Value::I32(v) => sys::gguf_set_val_i32(context, key, *v),
                Value::F32(v) => sys::gguf_set_val_f32(context, key, *v),
                Value::Bool(v) => sys::gguf_set_val_bool(context, key, *v),
                Value::Str(v) => sys::gguf_set_val_str(context, key, c_string(v).as_ptr()),
                Value::Strs(v) => {
                    let texts: Vec<CString> = v.iter().map(|s| c_string(s)).collect();
                    let mut pointers: Vec<_> = texts.iter().map(|s| s.as_ptr()).collect();
                    sys::gguf_set_arr_str(context, key, pointers.as_mut_ptr(), pointers.len());
                }
                Value::I32s(v) => sys::gguf_set_arr_data(
                    context,
                    key,
                    sys::GGUF_TYPE_INT32,
                    v.as_ptr().cast(),
                    v.len(),
                ),
            }
        }
    }

    /// The unsigned 16- or 32-bit integer under `key`, if there is one.
    pub fn get_integer(&self, key: &str) -> Option<u32> {
        let id = self.find(key)?;
        // SAFETY: `id` is valid, and the type is checked before the typed read.
        unsafe {
            match sys::gguf_get_kv_type(self.0, id) {
                sys::GGUF_TYPE_UINT16 => Some(sys::gguf_get_val_u16(self.0, id).into()),
                sys::GGUF_TYPE_UINT32 => Some(sys::gguf_get_val_u32(self.0, id)),
                _ => None,
            }
        }
    }

    /// The string under `key`, if there is one.
    pub fn get_str(&self, key: &str) -> Option<String> {
        let id = self.find(key)?;
        // SAFETY: `id` is valid, the type is checked, and the text is copied at once.
        unsafe {
            (sys::gguf_get_kv_type(self.0, id) == sys::GGUF_TYPE_STRING).then(|| {
                CStr::from_ptr(sys::gguf_get_val_str(self.0, id)).to_string_lossy().into_owned()
            })
        }
    }

    fn find(&self, key: &str) -> Option<i64> {
        // SAFETY: the context is alive and the key outlives the call.
        let id = unsafe { sys::gguf_find_key(self.0, c_string(key).as_ptr()) };
        (id >= 0).then_some(id)
    }

    /// Appends a tensor description. Names must be unique.
    pub fn add_tensor(&mut self, info: &TensorInfo) {
        assert!(info.ne.len() <= MAX_DIMS && (info.ne[0] as usize).is_multiple_of(info.ty.block()));
        let ne: Vec<i64> = info.ne.iter().map(|n| *n as i64).collect();
        let name = c_string(&info.name);
        // SAFETY: a no-alloc context with room for one tensor; gguf copies the description,
        // so the context may go at once.
        unsafe {
            let context = sys::ggml_init(sys::ggml_init_params {
                mem_size: 2 * sys::ggml_tensor_overhead(),
                mem_buffer: ptr::null_mut(),
                no_alloc: true,
            });
            assert!(!context.is_null(), "out of memory");
            let tensor = sys::ggml_new_tensor(context, info.ty.0, ne.len() as i32, ne.as_ptr());
            sys::ggml_set_name(tensor, name.as_ptr());
            sys::gguf_add_tensor(self.0, tensor);
            sys::ggml_free(context);
        }
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        // SAFETY: ids run from 0 to the number of tensors; names and extents are copied.
        unsafe {
            (0..sys::gguf_get_n_tensors(self.0))
                .map(|id| {
                    let name = CStr::from_ptr(sys::gguf_get_tensor_name(self.0, id));
                    let ne =
                        std::slice::from_raw_parts(sys::gguf_get_tensor_ne(self.0, id), MAX_DIMS);
                    let used = ne.iter().rposition(|n| *n != 1).map_or(1, |last| last + 1);
                    TensorInfo {
                        name: name.to_string_lossy().into_owned(),
                        ty: TensorType(sys::gguf_get_tensor_type(self.0, id)),
                        ne: ne[..used].iter().map(|n| *n as u64).collect(),
                    }
                })
                .collect()
        }
    }

    /// Offset in a file that was read of the data of tensor `index`.
    pub fn file_offset(&self, index: usize) -> u64 {
        // SAFETY: the context is alive.
        let data = unsafe { sys::gguf_get_data_offset(self.0) };
        data as u64 + self.data_offset(index)
    }

    /// Offset of tensor `index` from the end of the header.
    pub fn data_offset(&self, index: usize) -> u64 {
        // SAFETY: the context is alive and the index is checked.
        unsafe {
            assert!((index as i64) < sys::gguf_get_n_tensors(self.0));
            sys::gguf_get_tensor_offset(self.0, index as i64) as u64
        }
    }

    /// Tensor data starts at multiples of this.
    pub fn alignment(&self) -> u64 {
        // SAFETY: the context is alive.
        unsafe { sys::gguf_get_alignment(self.0) as u64 }
    }

    /// The header as it stands in a file, padded to where the data begins.
    pub fn to_bytes(&self) -> Vec<u8> {
        // SAFETY: the buffer has the size that gguf asks for.
        unsafe {
            let mut bytes = vec![0u8; sys::gguf_get_meta_size(self.0)];
            sys::gguf_get_meta_data(self.0, bytes.as_mut_ptr().cast());
            bytes
        }
    }
}

impl Drop for Header {
    fn drop(&mut self) {
        // SAFETY: created by gguf and not freed before.
        unsafe { sys::gguf_free(self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_writable_type_decodes_to_about_what_was_encoded() {
        let values: Vec<f32> = (0..512).map(|i| (i as f32 * 0.37).sin()).collect();
        for ty in TensorType::WRITABLE {
            let decoded = ty.decode(&ty.encode(&values));
            let error: f32 = values.iter().zip(&decoded).map(|(a, b)| (a - b).powi(2)).sum();
            let power: f32 = values.iter().map(|a| a * a).sum();
            assert!(error / power < 0.15, "{ty}: relative error {}", error / power);
            assert_eq!(TensorType::parse(&ty.name().to_lowercase()).unwrap(), ty);
        }
    }

    #[test]
    fn header_bytes_read_back_as_the_same_tensors_and_values() {
        let mut header = Header::default();
        header.set("general.architecture", &Value::Str("llama".into()));
        header.set("llama.expert_count", &Value::U32(8));
        let info = TensorInfo {
            name: "blk.0.ffn_up_exps.weight".into(),
            ty: TensorType::MXFP4,
            ne: vec![64, 3, 5],
        };
        assert_eq!(info.bytes(), 2 * 3 * 5 * 17);
        header.add_tensor(&info);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), header.to_bytes()).unwrap();
        let read = Header::open(file.path()).unwrap();
        assert_eq!(read.tensors(), [info]);
        assert_eq!(read.get_integer("llama.expert_count"), Some(8));
        assert_eq!(read.get_str("general.architecture").as_deref(), Some("llama"));
        assert_eq!(read.get_integer("general.architecture"), None);
    }

    #[test]
    fn a_file_that_is_not_gguf_is_refused_with_its_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"hello").unwrap();
        let error = Header::open(file.path()).err().unwrap().to_string();
        assert!(error.contains("not a GGUF file"), "{error}");
    }
}
