//! A look at one tensor of a running graph.

use llama_cpp_sys_2 as sys;

/// Sees tensors while a graph is computed ([`ContextOptions::on_tensor`]).
///
/// [`ContextOptions::on_tensor`]: crate::ContextOptions::on_tensor
pub trait TensorObserver {
    /// Whether [`observe`](Self::observe) shall be called for this tensor. Asked
    /// for every node of every graph; a yes splits the graph there, so say it
    /// rarely.
    fn wants(&mut self, name: &str) -> bool;
    /// The tensor after it was computed.
    fn observe(&mut self, name: &str, tensor: &TensorView);
}

/// Shape, strides and bytes of a tensor, in ggml's conventions.
pub struct TensorView {
    /// Element type, one of llama.cpp's `GGML_TYPE_*`.
    pub ty: u32,
    /// Elements in each dimension, fastest first.
    pub ne: [i64; 4],
    /// Bytes from one element to the next in each dimension.
    pub nb: [usize; 4],
    /// The bytes that the strides reach into; a copy.
    pub data: Vec<u8>,
}

impl TensorView {
    /// The elements in order (dimension 0 fastest), whatever the strides;
    /// `None` if they are not F32.
    pub fn f32(&self) -> Option<Vec<f32>> {
        self.elements(sys::GGML_TYPE_F32, f32::from_ne_bytes)
    }

    /// The elements in order (dimension 0 fastest), whatever the strides;
    /// `None` if they are not I32.
    pub fn i32(&self) -> Option<Vec<i32>> {
        self.elements(sys::GGML_TYPE_I32, i32::from_ne_bytes)
    }

    fn elements<T>(&self, ty: u32, read: fn([u8; 4]) -> T) -> Option<Vec<T>> {
        if self.ty != ty {
            return None;
        }
        let n = self.ne.map(|n| n.max(0) as usize);
        let mut out = Vec::with_capacity(n.iter().product());
        for i3 in 0..n[3] {
            for i2 in 0..n[2] {
                for i1 in 0..n[1] {
                    let row = i1 * self.nb[1] + i2 * self.nb[2] + i3 * self.nb[3];
                    for i0 in 0..n[0] {
                        let at = row + i0 * self.nb[0];
                        let bytes = self.data.get(at..at + 4)?;
                        out.push(read([bytes[0], bytes[1], bytes[2], bytes[3]]));
                    }
                }
            }
        }
        Some(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strided_view_is_read_in_order() {
        // Columns 0 and 1 of rows that are 3 wide.
        let data: Vec<u8> =
            [10, 11, 12, 20, 21, 22].iter().flat_map(|v: &i32| v.to_ne_bytes()).collect();
        let view =
            TensorView { ty: sys::GGML_TYPE_I32, ne: [2, 2, 1, 1], nb: [4, 12, 24, 24], data };
        assert_eq!(view.i32(), Some(vec![10, 11, 20, 21]));
        assert_eq!(view.f32(), None);
    }
}
