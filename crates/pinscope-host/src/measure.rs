//! What a context costs, before anything is allocated.

use crate::context::{create, params};
use crate::{log, ContextOptions, HostError, Model};
use llama_cpp_sys_2 as sys;

/// Bytes that a context allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContextCost {
    /// KV cache, and the state of recurrent layers.
    pub kv: u64,
    /// Compute buffers.
    pub compute: u64,
    /// Logits.
    pub output: u64,
}

impl Model {
    /// Measures what a context for this model, loaded with
    /// [`ModelOptions::no_alloc`](crate::ModelOptions::no_alloc), would
    /// allocate; allocates neither KV cache nor compute buffers.
    ///
    /// llama.cpp has this as a C++ function only (`llama_get_memory_breakdown`),
    /// but it logs every size, so the log is read. The wording is safe to rely
    /// on because the version of llama.cpp is pinned, a line that is missing is
    /// an error here, and a test compares the result with a real context.
    ///
    /// # Errors
    /// Those of making a context; a model that has been loaded for real.
    pub fn measure(&self, o: &ContextOptions) -> Result<ContextCost, HostError> {
        let error = |reason: String| HostError::Context { reason };
        if !self.is_skeleton() {
            return Err(error("only a model without allocations can be measured".into()));
        }
        let (context, lines) = log::capture(|| create(self, params(o)));
        let context = context?;
        // SAFETY: the context is valid, ours and not used again.
        let n_batch = unsafe {
            let n_batch = sys::llama_n_batch(context.as_ptr());
            sys::llama_free(context.as_ptr());
            n_batch
        };
        let missing = |what| error(format!("llama.cpp did not log the size of its {what}"));
        let rows = match o.max_outputs {
            0 => n_batch,
            n => n.min(n_batch),
        };
        Ok(ContextCost {
            kv: kv(&lines).ok_or_else(|| missing("KV cache"))?,
            compute: sum(&lines, |_| true, "compute buffer size =")
                .ok_or_else(|| missing("compute buffers"))?,
            output: u64::from(rows) * self.n_vocab() as u64 * 4,
        })
    }
}

/// Without allocations "KV buffer size" is 0; the line after it, with the sizes
/// of K and V, is right. Recurrent states are really allocated, and small.
fn kv(lines: &[String]) -> Option<u64> {
    [
        sum(lines, |l| l.contains(" K (") && l.contains(" V ("), "size ="),
        sum(lines, |_| true, "RS buffer size ="),
        sum(lines, |_| true, "state buffer size ="),
    ]
    .into_iter()
    .flatten()
    .reduce(|a, b| a + b)
}

/// Adds the "MiB" figures that follow `label`; `None` if no line has one.
fn sum(lines: &[String], wanted: impl Fn(&str) -> bool, label: &str) -> Option<u64> {
    let mut total = None;
    for line in lines.iter().filter(|l| wanted(l)) {
        let Some((_, rest)) = line.split_once(label) else {
            continue;
        };
        let number = rest.split_whitespace().next().and_then(|n| n.parse::<f64>().ok());
        if let Some(mib) = number {
            // Two decimals are logged: round up, never below the truth.
            *total.get_or_insert(0) += ((mib + 0.005) * 1_048_576.0).ceil() as u64;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_summed_over_backends_and_rounded_up() {
        let lines = [
            "sched_reserve:        CPU compute buffer size =   1.00 MiB".to_owned(),
            "sched_reserve:   PinScope compute buffer size =   0.50 MiB".to_owned(),
            "llama_kv_cache: size =    2.00 MiB (  4096 cells,  24 layers,  1/1 seqs), \
             K (f16):    1.00 MiB, V (f16):    1.00 MiB"
                .to_owned(),
        ];
        let all = |_: &str| true;
        let got = sum(&lines, all, "compute buffer size =").unwrap();
        assert!((1_572_864..1_572_864 + 11_000).contains(&got), "{got}");
        assert_eq!(sum(&lines, all, "RS buffer size ="), None);
        let kv = kv(&lines).unwrap();
        assert!((2_097_152..2_097_152 + 6_000).contains(&kv), "{kv}");
    }
}
