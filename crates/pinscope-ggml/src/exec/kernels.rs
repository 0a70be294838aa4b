//! Who computes the products with weights of a type: PinScope's own kernels
//! where they give ggml's bits, ggml's `vec_dot` for single columns, or ggml's
//! own nodes.
//!
//! Whether the bits are equal depends on how ggml was compiled and, in the
//! plug-in, on whose ggml it is. So it is not assumed: before the first use
//! ggml computes a small product of each type, and a kernel that gives other
//! bits is not used.

use std::sync::OnceLock;

use pinscope_kernels::{kernels_for, prefetch, Kernel, Order, Product, WeightType};

use super::probe;
use super::program::Program;
use crate::ffi::{self, Numbers, TypeTraits};

/// Columns from which on ggml may add in another order.
const MANY: usize = 8;

/// A kernel, and where its bits are ggml's.
#[derive(Clone, Copy)]
struct Own {
    kernel: Kernel,
    /// The order with ggml's bits for fewer columns than [`MANY`], if any.
    few: Option<Order>,
    /// The same from [`MANY`] on.
    many: Option<Order>,
}

/// The functions for weights of one type.
#[derive(Clone, Copy)]
pub struct Kernels {
    traits: &'static TypeTraits,
    /// Brings the input into the form that the product takes; `None` for F32.
    from_float: Option<ffi::FromFloat>,
    own: Option<Own>,
}

impl Kernels {
    /// The kernels for products of operation `op` with weights of `type_`;
    /// `None` where ggml's CPU library hides its own from us, and products must
    /// be ggml's nodes.
    fn of(numbers: &Numbers, op: u32, type_: u32) -> Option<Self> {
        static OWN: OnceLock<Vec<(u32, u32, Own)>> = OnceLock::new();
        let traits = ffi::type_traits(type_)?;
        let from_float = ffi::type_traits(traits.vec_dot_type)?.from_float;
        let all = OWN.get_or_init(|| probed(numbers));
        let own = all.iter().find(|(o, t, _)| (*o, *t) == (op, type_)).map(|&(.., own)| own);
        Some(Self { traits, from_float, own })
    }

    /// For products with experts' weights.
    pub fn of_experts(numbers: &Numbers, type_: u32) -> Option<Self> {
        Self::of(numbers, numbers.mul_mat_id, type_)
    }

    /// For a product of `columns` with a dense matrix; `None` where it has to be
    /// ggml's node: ggml takes other functions than `vec_dot` for some types.
    pub fn of_dense(numbers: &Numbers, type_: u32, columns: usize) -> Option<Self> {
        Self::of(numbers, numbers.mul_mat, type_).filter(|k| k.own_for(columns).is_some())
    }

    /// ggml's type of a quantised input.
    pub fn input_type(&self) -> u32 {
        self.traits.vec_dot_type
    }

    /// Whether products of an expert with that many columns can be computed
    /// here.
    pub fn serve(&self, columns: usize) -> bool {
        columns == 1 || self.own_for(columns).is_some()
    }

    /// Whether all products of `program` can be computed here, however many
    /// columns an expert has.
    pub fn serve_all(numbers: &Numbers, program: &Program) -> bool {
        program.steps.iter().filter(|s| s.part.is_some()).all(|s| {
            // SAFETY: the program's nodes and their weights are alive.
            let type_ = unsafe { (*(*s.node).src[0]).type_ };
            Self::of_experts(numbers, type_).is_some_and(|k| k.serve(MANY - 1) && k.serve(MANY))
        })
    }

    /// Our kernel for that many columns.
    fn own_for(&self, columns: usize) -> Option<(Kernel, Order)> {
        let own = self.own?;
        let order = if columns < MANY { own.few } else { own.many };
        order.map(|order| (own.kernel, order))
    }

    /// Bytes of a quantised input of `n` values, or more.
    pub fn input_bytes(&self, n: usize) -> usize {
        match self.own {
            Some(Own { kernel, .. }) => {
                let type_ = kernel.weight_type();
                n.div_ceil(type_.block_len()) * type_.input_block_bytes()
            }
            // No type is wider than F32 and a scale a block.
            None => n * 4 + 64,
        }
    }

    /// Quantises `n` values into `room`; does nothing for a type that
    /// [takes floats](Self::takes_floats).
    ///
    /// # Safety
    /// The values are there, and `room` has [`Kernels::input_bytes`] that
    /// nobody else uses now.
    pub unsafe fn quantise(&self, values: *const f32, room: *mut u8, n: usize) {
        if let Some(from_float) = self.from_float {
            // SAFETY: by the caller's promise.
            unsafe { from_float(values, room.cast(), n as i64) };
        }
    }

    /// Whether inputs are taken as they are, in F32.
    pub fn takes_floats(&self) -> bool {
        self.from_float.is_none()
    }

    /// Computes `product`.
    ///
    /// # Safety
    /// As for [`Kernel::multiply`]; the columns are [served](Self::serve).
    pub unsafe fn multiply(&self, product: &Product) {
        if let Some((kernel, order)) = self.own_for(product.columns.len()) {
            // SAFETY: by the caller's promise.
            return unsafe { kernel.multiply(order, product) };
        }
        for (&column, &out) in product.columns.iter().zip(product.out) {
            for row in product.rows.clone() {
                let weights = product.weights.wrapping_add(row * product.row_bytes);
                prefetch(weights.wrapping_add(ROWS_AHEAD * product.row_bytes), product.row_bytes);
                let n = product.n_in as i32;
                // SAFETY: by the caller's promise.
                unsafe {
                    let out = out.add(row);
                    (self.traits.vec_dot)(n, out, 0, weights.cast(), 0, column.cast(), 0, 1);
                }
            }
        }
    }
}

/// Rows ahead of the one in work whose bytes are asked for. The processor's
/// own prefetcher stops at each page, a few rows on: asking early gave 1.2 to
/// 1.3 times the bandwidth (Q4_K, 2 x Zen 3, 3 rows; 2 to 6 were alike).
const ROWS_AHEAD: usize = 3;

/// Our kernels that give the bits of the ggml that is there, by ggml's numbers
/// of the operation and the type.
fn probed(numbers: &Numbers) -> Vec<(u32, u32, Own)> {
    let Some(prober) = probe::Prober::new(*numbers) else { return Vec::new() };
    let own = |op: u32, weight_type: WeightType| {
        // SAFETY: `ggml_type_name` answers null or a constant for any number.
        let named = |&t: &u32| unsafe { ffi::text(ffi::ggml_type_name(t)) };
        let type_ = (0..ffi::TYPE_COUNT).find(|t| named(t) == weight_type.name())?;
        let own = kernels_for(weight_type).into_iter().find_map(|kernel| {
            let agrees = |order: &Order, columns: &[usize]| {
                columns.iter().all(|&n| prober.agrees((op, type_), &kernel, *order, n))
            };
            let order = |columns: &[usize]| {
                [Order::VecDot, Order::Tiled]
                    .into_iter()
                    .find(|order| kernel.has(*order) && agrees(order, columns))
            };
            let own = Own { kernel, few: order(&[1, 2, MANY - 1]), many: order(&[MANY, 40]) };
            own.few.or(own.many).map(|_| own)
        });
        own.map(|own| (op, type_, own))
    };
    let ops = [numbers.mul_mat_id, numbers.mul_mat];
    ops.into_iter().flat_map(|op| WeightType::ALL.map(|type_| own(op, type_))).flatten().collect()
}

#[cfg(test)]
mod tests {
    use llama_cpp_sys_2 as _; // links ggml

    use super::*;

    /// ggml is compiled here with the instructions that our kernels mirror, so
    /// a kernel that the probe refuses is a wrong one.
    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn the_probe_accepts_each_type_in_the_order_that_ggml_has() {
        #[cfg(target_arch = "x86_64")]
        if !is_x86_feature_detected!("avx2") {
            return;
        }
        crate::api::link();
        let found = probed(&ffi::check().unwrap());
        assert_eq!(found.len(), 2 * WeightType::ALL.len());
        for (.., own) in found {
            let large = own.kernel.weight_type().block_len() == 256;
            let many =
                if large && cfg!(target_arch = "x86_64") { Order::Tiled } else { Order::VecDot };
            assert_eq!((own.few, own.many), (Some(Order::VecDot), Some(many)), "{:?}", own.kernel);
        }
    }

    #[test]
    fn the_probe_refuses_other_bits() {
        crate::api::link();
        let numbers = ffi::check().unwrap();
        let prober = probe::Prober::new(numbers).unwrap();
        for kernel in kernels_for(WeightType::Q4K) {
            let (op, type_, _) = probed(&numbers)[0];
            let agrees = |order| prober.agrees((op, type_), &kernel, order, 7);
            assert!(agrees(Order::VecDot));
            assert!(!kernel.has(Order::Tiled) || !agrees(Order::Tiled), "another order");
        }
    }
}
