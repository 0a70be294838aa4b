//! Tensors and rows of a group, in memory that is kept from graph to graph.

use std::ffi::c_void;

use super::{products, Group, Workspace, ALIGN};
use crate::exec::program::{Program, Source};
use crate::ffi::{self, Tensor};

impl Workspace {
    /// Makes room before any address is taken.
    pub(super) fn reserve(
        &mut self,
        program: &Program,
        group: Group,
        p: usize,
        tail: &[*mut Tensor],
    ) {
        let row = |t: &Tensor| (t.ne[0] as usize * 4 * p).next_multiple_of(ALIGN);
        let mut bytes = 4 * (p * 4).next_multiple_of(ALIGN) + ALIGN;
        bytes += tail.iter().filter_map(|&node| self.bytes_of_dense(node)).sum::<usize>();
        for step in &program.steps {
            // SAFETY: nodes and operands are alive.
            unsafe {
                bytes += row(&*step.node);
                if let Some(kernels) = products::kernels(&self.numbers, step, group) {
                    let n = (*(*step.node).src[0]).ne[0] as usize;
                    bytes += kernels.input_bytes(n).next_multiple_of(ALIGN) * p;
                    continue;
                }
                for (source, &operand) in step.sources.iter().zip(&(*step.node).src) {
                    if matches!(source, Source::Token | Source::Column) {
                        bytes += row(&*operand);
                    }
                }
            }
        }
        self.make_room(bytes);
    }

    /// Has at least so many bytes of scratch, whose old content is lost.
    pub(super) fn make_room(&mut self, bytes: usize) {
        if self.scratch.len() * 8 < bytes {
            self.scratch = Vec::new(); // the old one goes first
            self.scratch = vec![0; bytes.div_ceil(8)];
        }
    }

    pub(super) fn allot(&mut self, bytes: usize) -> *mut u8 {
        let base = self.scratch.as_mut_ptr().cast::<u8>();
        let start = base.align_offset(ALIGN) + self.used;
        self.used += bytes.next_multiple_of(ALIGN);
        assert!(start + bytes <= self.scratch.len() * 8, "scratch was reserved too small");
        base.wrapping_add(start)
    }

    pub(super) fn tensor(&mut self, t: Tensor) -> *mut Tensor {
        // Addresses of earlier tensors are in use: the vector must not move.
        assert!(self.tensors.len() < self.tensors.capacity(), "too many tensors for one graph");
        self.tensors.push(Tensor {
            flags: ffi::TENSOR_FLAG_COMPUTE,
            buffer: std::ptr::null_mut(),
            view_src: std::ptr::null_mut(),
            view_offs: 0,
            extra: std::ptr::null_mut(),
            padding: t.padding,
            ..t
        });
        self.tensors.last_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut)
    }

    /// F32 `[ne0, p]` in scratch.
    pub(super) fn rows(&mut self, ne0: i64, p: usize) -> *mut Tensor {
        let row = ne0 as usize * 4;
        let data = self.allot(row * p).cast();
        self.tensor(blank(self.numbers.f32, [ne0, p as i64], [4, row], data))
    }

    pub(super) fn i32s(&mut self, values: impl Iterator<Item = i32> + Clone) -> *mut Tensor {
        let n = values.clone().count();
        let data = self.allot(n * 4).cast::<i32>();
        for (i, v) in values.enumerate() {
            // SAFETY: `n` values were allotted, aligned to 64 bytes.
            unsafe { data.add(i).write(v) };
        }
        self.tensor(blank(self.numbers.i32, [n as i64, 1], [4, n * 4], data.cast()))
    }
}

pub(in crate::exec) fn blank(
    type_: u32,
    ne: [i64; 2],
    nb: [usize; 2],
    data: *mut c_void,
) -> Tensor {
    let all = nb[1] * ne[1] as usize;
    Tensor {
        type_,
        buffer: std::ptr::null_mut(),
        ne: [ne[0], ne[1], 1, 1],
        nb: [nb[0], nb[1], all, all],
        op: 0,
        op_params: [0; 16],
        flags: 0,
        src: [std::ptr::null_mut(); ffi::MAX_SRC],
        view_src: std::ptr::null_mut(),
        view_offs: 0,
        data,
        name: [0; 64],
        extra: std::ptr::null_mut(),
        padding: [0; 8],
    }
}

/// Rows `first .. first + n` of a `[ne0, p]` tensor.
pub(super) fn part_of_rows(t: Tensor, first: usize, n: usize) -> Tensor {
    Tensor {
        ne: [t.ne[0], n as i64, 1, 1],
        data: t.data.cast::<u8>().wrapping_add(first * t.nb[1]).cast(),
        op: 0,
        src: [std::ptr::null_mut(); ffi::MAX_SRC],
        ..t
    }
}
