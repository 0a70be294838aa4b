//! `pinscope simulate`: which policy would have kept what was needed?

mod show;

use std::path::{Path, PathBuf};

use pinscope::policy::{self, PolicyKind};
use pinscope::profile::{Profile, ProfileError};
use pinscope::simulate::{belady, replay, textbook_lru, Outcome, Room, Warm};
use pinscope::trace::Trace;

use crate::plot;

/// Options of `pinscope simulate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Traces: of `pinscope trace`, or BigMoeOnEdge's CSV
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Memory for experts alone; several with commas. A share is one of all
    /// experts of the model
    #[arg(long, value_name = "AMOUNT,...", value_delimiter = ',', required = true)]
    ram: Vec<Budget>,
    /// Policies, with commas, or all
    #[arg(long, value_name = "NAME,...", default_value = "all", value_parser = policies)]
    policy: Policies,
    /// Let all sizes of experts share one pool without a gap, instead of
    /// cutting slots as PinScope does
    #[arg(long)]
    shared: bool,
    /// Replay this many generated tokens first and do not count them
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip: u64,
    /// Begin with what this profile says
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Draw hit rates over budgets; for one trace
    #[arg(long, value_name = "FILE.svg", value_parser = plot::check_name)]
    plot: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Policies by name.
#[derive(Debug, Clone)]
struct Policies(Vec<PolicyKind>);

fn policies(names: &str) -> Result<Policies, policy::UnknownPolicy> {
    match names {
        "all" => Ok(Policies(PolicyKind::ALL.to_vec())),
        names => names.split(',').map(str::parse).collect::<Result<_, _>>().map(Policies),
    }
}

/// Bytes, or a share of all experts.
#[derive(Debug, Clone)]
struct Budget(String);

impl std::str::FromStr for Budget {
    type Err = pinscope::memory::RamError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        pinscope::memory::parse_ram(text, u64::MAX).map(|_| Self(text.to_owned()))
    }
}

/// A policy at a budget.
struct Row {
    policy: &'static str,
    /// One for each budget.
    outcomes: Vec<Outcome>,
}

/// A trace, its budgets, and what became of them.
struct Table {
    path: PathBuf,
    trace: Trace,
    budgets: Vec<(String, u64)>,
    /// The yardstick comes first, the best that could be done last.
    rows: Vec<Row>,
}

const YARDSTICK: &str = "lru (textbook)";
const BEST: &str = "belady";

/// Runs the subcommand.
///
/// # Errors
/// Traces and profiles that cannot be used, budgets that are too small.
pub fn main(args: &Args) -> Result<(), Box<dyn std::error::Error>> {
    if args.plot.is_some() && args.traces.len() > 1 {
        return Err("a plot shows one trace: give one, or leave --plot out".into());
    }
    let tables: Result<Vec<_>, _> = args.traces.iter().map(|path| table(args, path)).collect();
    let tables = tables?;
    if let (Some(path), [table]) = (&args.plot, &tables[..]) {
        show::draw(table, path)?;
    }
    match args.json {
        true => show::print_json(&tables)?,
        false => tables.iter().try_for_each(show::print)?,
    }
    Ok(())
}

fn table(args: &Args, path: &Path) -> Result<Table, Box<dyn std::error::Error>> {
    let trace = Trace::load(path)?;
    let map = trace.model.map()?;
    let rates = match &args.profile {
        Some(profile) => Some(rates(profile, &trace)?),
        None => None,
    };
    let passes = trace.passes.iter();
    let mut generated = 0;
    let counted = |p: &pinscope::trace::Pass| {
        generated += u64::from(p.decode && p.layer == 0);
        generated > args.skip
    };
    let passes = match args.skip {
        0 => 0,
        skip => passes.clone().position(counted).ok_or_else(|| {
            format!("{} has no more than the {skip} tokens of --skip", path.display())
        })?,
    };
    let warm = Warm { rates: rates.as_deref(), passes };
    let mut budgets = Vec::new();
    let mut rooms = Vec::new();
    for Budget(text) in &args.ram {
        let bytes = pinscope::memory::parse_ram(text, map.expert_bytes_total())?;
        budgets.push((text.clone(), bytes));
        rooms.push(match args.shared {
            true => Room::shared(&map, bytes),
            false => Room::slots(&trace.model, bytes)?,
        });
    }
    let plain = |room| replay(&trace, room, &mut textbook_lru, warm);
    let outcomes = rooms.iter().map(plain).collect();
    let mut rows = vec![Row { policy: YARDSTICK, outcomes }];
    for &kind in &args.policy.0 {
        let run = |room| replay(&trace, room, &mut |shape| policy::build(kind, shape), warm);
        rows.push(Row { policy: kind.name(), outcomes: rooms.iter().map(run).collect() });
    }
    let best = rooms.iter().map(|room| belady(&trace, room, warm));
    rows.push(Row { policy: BEST, outcomes: best.collect() });
    Ok(Table { path: path.to_owned(), trace, budgets, rows })
}

/// What the profile at `path` expects, if it is one of the trace's model.
fn rates(path: &Path, trace: &Trace) -> Result<Vec<f64>, ProfileError> {
    let profile = Profile::load(path)?;
    if Some(profile.model().id) != trace.model.id {
        let (of, wanted) = (profile.model().name.clone(), trace.model.name.clone());
        return Err(ProfileError::OtherModel { of, wanted });
    }
    Ok(profile.rate())
}
