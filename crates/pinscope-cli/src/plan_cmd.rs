//! `pinscope plan`: what the RAM would be used for.

use std::io::Write;

use pinscope::arena::huge_pages;
use pinscope::memory::format_bytes;
use pinscope::plan::Plan;
use serde::Serialize;

use crate::args::PlanArgs;
use crate::engine::Prepared;
use crate::ram::Ram;
use crate::{pinning, style};

/// The JSON of `--json`: the plan and what it is for.
#[derive(Serialize)]
struct Report<'a> {
    model: String,
    n_ctx: u32,
    /// False when `ram_bytes` is below `smallest_ram_bytes`.
    works: bool,
    /// Expert memory comes in huge pages.
    huge_pages: bool,
    #[serde(flatten)]
    plan: &'a Plan,
    /// With `--profile`, unless everything fits.
    pins: Option<Pins>,
}

#[derive(Serialize)]
struct Pins {
    /// Pinned experts.
    count: usize,
    bytes: u64,
    /// Of the memory for experts, that pins may take.
    share: f64,
    /// Share of a generated token's choices that pins should serve.
    promise: f64,
    /// Pins will not help: experts are used about equally.
    flat: bool,
}

/// Prints the plan.
///
/// # Errors
/// A file that is no Mixture-of-Experts model; after printing, a RAM that is
/// too small.
pub fn main(args: &PlanArgs) -> Result<(), Box<dyn std::error::Error>> {
    let ram = Ram::bytes(args.model.ram.as_ref())?;
    let mut prepared = Prepared::new(&args.model.model, ram, &args.model.context_options())?;
    prepared.pin(&args.pinning)?;
    let pins = prepared.pins.as_ref().map(|p| Pins {
        count: p.pins.len(),
        bytes: prepared.pinned_bytes(),
        share: p.share,
        promise: p.promise,
        flat: p.flat,
    });
    let plan = &prepared.plan;
    let mut out = std::io::stdout().lock();
    if args.json {
        let report = Report {
            model: args.model.model.display().to_string(),
            n_ctx: prepared.n_ctx,
            works: plan.check().is_ok(),
            huge_pages: huge_pages(),
            plan,
            pins,
        };
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        writeln!(out, "{}", table(plan, prepared.n_ctx))?;
        writeln!(out, "{}", summary(plan))?;
        writeln!(out, "{}", pages())?;
        if let Some(pins) = &prepared.pins {
            writeln!(out, "{}.", pinning::describe(pins, prepared.pinned_bytes()))?;
        }
        for warning in &plan.warnings {
            writeln!(out, "\nWarning: {warning}")?;
        }
    }
    out.flush()?;
    Ok(plan.check()?)
}

fn table(plan: &Plan, n_ctx: u32) -> String {
    let mut table = style::table();
    table.set_header(["RAM", &format_bytes(plan.ram_bytes), "share"]);
    let experts = match plan.arena_bytes {
        0 => "Experts (too little is left)".to_owned(),
        _ => format!("Experts ({} of {})", plan.experts_resident, plan.experts_total),
    };
    for (what, bytes) in [
        ("Dense weights", plan.dense_bytes),
        (&format!("KV cache ({n_ctx} tokens)"), plan.kv_bytes),
        ("Compute buffers", plan.compute_bytes + plan.output_bytes),
        ("Program, vocabulary, page tables", plan.overhead_bytes),
        (&experts, plan.arena_bytes),
    ] {
        let share = 100.0 * bytes as f64 / plan.ram_bytes.max(1) as f64;
        table.add_row([what, &format_bytes(bytes), &format!("{share:.1} %")]);
    }
    style::numbers_right(&mut table);
    table.to_string()
}

fn pages() -> &'static str {
    match huge_pages() {
        true => "Memory for experts comes in huge pages.",
        false => {
            "Memory for experts comes in small pages, which is slower; this gives huge ones:\n  \
             echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        }
    }
}

fn summary(plan: &Plan) -> String {
    let fit = match (plan.arena_bytes, plan.fits_all) {
        (0, _) => "The experts do not fit at all".to_owned(),
        (_, true) => "All experts fit".to_owned(),
        _ => format!(
            "{:.1} % of the experts fit",
            100.0 * plan.experts_resident as f64 / plan.experts_total.max(1) as f64
        ),
    };
    format!(
        "{fit}; all together they have {}. A token uses {} of them ({}), at most {} in a layer.\n\
         Smallest RAM that works: {}. Everything fits from {}.",
        format_bytes(plan.expert_bytes_total),
        plan.experts_per_token,
        format_bytes(plan.token_demand_bytes),
        format_bytes(plan.layer_demand_bytes),
        format_bytes(plan.smallest_ram_bytes),
        format_bytes(plan.full_ram_bytes),
    )
}
