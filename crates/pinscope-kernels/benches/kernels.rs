//! Speed of the kernels beside ggml's: `cargo bench --workspace --bench kernels`.
//!
//! Weights are larger than the caches. One column is what a token needs, four
//! are an expert's share of a small batch, 32 that of a prompt. ggml computes one
//! column with `vec_dot`, row by row, and more with its MUL_MAT_ID.
//! Arguments choose types by name.

#[path = "../tests/common/mod.rs"]
mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{kernels, Case, Fill};
use pinscope_kernels::{Kernel, Order, Product, WeightType};

const BYTES: usize = 256 << 20;
const N_IN: usize = 2048;
/// Rows that a thread takes at a time.
const CHUNK: usize = 64;
/// How long each figure is measured; the fastest pass counts.
const TIME: Duration = Duration::from_millis(400);

/// A matrix of [`BYTES`]: rows repeat, which no kernel notices.
fn case(type_: WeightType, columns: usize) -> Case {
    let mut case = Case::new(type_, N_IN, 1024, columns, Fill::Usual, 1);
    case.rows = BYTES / case.row_bytes();
    case.weights =
        case.weights.iter().copied().cycle().take(case.rows * case.row_bytes()).collect();
    case
}

/// The fastest of a few passes.
fn fastest(mut pass: impl FnMut()) -> Duration {
    let begin = Instant::now();
    let mut best = Duration::MAX;
    while begin.elapsed() < TIME || best == Duration::MAX {
        let start = Instant::now();
        pass();
        best = best.min(start.elapsed());
    }
    best
}

/// Has `threads` threads take chunks of rows.
fn in_chunks(rows: usize, threads: usize, work: impl Fn(std::ops::Range<usize>) + Sync) {
    let next = AtomicUsize::new(0);
    let run = || loop {
        let first = next.fetch_add(CHUNK, Ordering::Relaxed);
        if first >= rows {
            return;
        }
        work(first..rows.min(first + CHUNK));
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(run);
        }
        run();
    });
}

/// Addresses that threads share.
struct Shared<'a>(Vec<*const u8>, Vec<*mut f32>, &'a Case);

// SAFETY: threads write different rows.
unsafe impl Sync for Shared<'_> {}

impl Shared<'_> {
    fn multiply(&self, kernel: &Kernel, order: Order, rows: std::ops::Range<usize>) {
        let case = self.2;
        let product = Product {
            n_in: case.n_in,
            weights: case.weights.as_ptr(),
            row_bytes: case.row_bytes(),
            rows,
            columns: &self.0,
            out: &self.1,
        };
        // SAFETY: all lengths fit.
        unsafe { kernel.multiply(order, &product) }
    }

    fn vec_dot(&self, rows: std::ops::Range<usize>) {
        let case = self.2;
        for row in rows {
            // SAFETY: all lengths fit, and ggml's traits are constant.
            unsafe {
                let number = common::number(case.type_);
                let dot = (*llama_cpp_sys_2::ggml_get_type_traits_cpu(number)).vec_dot.unwrap();
                let w = case.weights.as_ptr().add(row * case.row_bytes()).cast();
                dot(case.n_in as i32, self.1[0].add(row), 0, w, 0, self.0[0].cast(), 0, 1);
            }
        }
    }
}

/// Bytes a second at which so many threads read memory: a word of each cache
/// line, from eight places at once, which is faster than one after the other.
fn memory(threads: usize) -> f64 {
    const LINE: usize = 8;
    let words = vec![1u64; BYTES / 8];
    let sum = AtomicUsize::new(0);
    let took = fastest(|| {
        // Rows of 4096 bytes.
        in_chunks(BYTES / 4096, threads, |rows| {
            let part = &words[rows.start * 512..rows.end * 512];
            let places: Vec<&[u64]> = part.chunks(part.len().div_ceil(8)).collect();
            let lines = (0..places[0].len()).step_by(LINE);
            let part = lines.map(|at| places.iter().fold(0, |a, p| a ^ p[at.min(p.len() - 1)]));
            sum.fetch_xor(part.fold(0, |a, b| a ^ b) as usize, Ordering::Relaxed);
        });
    });
    BYTES as f64 / took.as_secs_f64()
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let read = [memory(1) / 1e9, memory(2) / 1e9];
    println!("memory reads: 1 thread {:.1}, 2 threads {:.1} GB/s", read[0], read[1]);
    println!("type    columns threads  kernel     GB/s  GMAC/s   ggml GB/s  GMAC/s  times");
    for type_ in WeightType::ALL {
        if !wanted.is_empty() && !wanted.iter().any(|w| w == type_.name()) {
            continue;
        }
        for columns in [1, 4, 32] {
            let case = case(type_, columns);
            let mut out = vec![0.0f32; case.rows * columns];
            let outs = out.chunks_exact_mut(case.rows).map(|c| c.as_mut_ptr()).collect();
            let shared = Shared((0..columns).map(|c| case.column(c)).collect(), outs, &case);
            for threads in [1, 2] {
                let theirs = fastest(|| match columns {
                    1 => in_chunks(case.rows, threads, |rows| shared.vec_dot(rows)),
                    _ => drop(case.mul_mat_id(threads as i32)),
                });
                for kernel in kernels(type_) {
                    let tiled = columns >= 8 && kernel.has(Order::Tiled);
                    let order = if tiled { Order::Tiled } else { Order::VecDot };
                    let ours = fastest(|| {
                        in_chunks(case.rows, threads, |rows| shared.multiply(&kernel, order, rows));
                    });
                    let (path, name) = (kernel.path(), type_.name());
                    let bytes = case.weights.len() as f64 / 1e9;
                    let macs = (case.rows * case.n_in * columns) as f64 / 1e9;
                    let per = |t: Duration| (bytes / t.as_secs_f64(), macs / t.as_secs_f64());
                    let ((a, b), (c, d)) = (per(ours), per(theirs));
                    println!(
                        "{name:8}{columns:7}{threads:8}  {path:8}{a:7.2}{b:8.1}{c:12.2}{d:8.1}{:7.2}",
                        a / c
                    );
                }
            }
        }
    }
}
