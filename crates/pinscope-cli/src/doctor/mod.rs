//! `pinscope doctor`: what decides speed on this machine, measured, and the one
//! change that would help most.

mod advice;
mod checks;
mod disk;
mod estimate;
mod machine;
mod memory;
mod outlook;
mod process;
mod report;

use std::error::Error;
use std::path::PathBuf;

use pinscope::map::ExpertMap;
use pinscope::memory::Memory;
use pinscope::pin::lockable_bytes;
use pinscope_ggml::read_map;

use crate::ram::Ram;
use crate::style;
use crate::threads::default_threads;
use advice::{advise, Advice, Situation};
use disk::Disk;
use estimate::Rates;
use machine::{FileSystem, Machine};
use outlook::Outlook;
use process::Process;

/// Bytes read at a place where no model says how large its experts are.
const USUAL_RUN: usize = 1 << 20;

/// Options of `pinscope doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The GGUF file that is to run here; without it a file of 256 MiB is
    /// written to the current folder, read and removed
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// What the model's traffic uses, from `pinscope profile`
    #[arg(long, value_name = "FILE", requires = "model")]
    profile: Option<PathBuf>,
    /// Memory that PinScope is to have [default: what is free less a tenth]
    #[arg(long, value_name = "AMOUNT")]
    ram: Option<Ram>,
    /// Look at this running process too
    #[arg(long, value_name = "ID")]
    pid: Option<u32>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// All that was found out.
struct Findings {
    machine: Machine,
    memory: Memory,
    file_system: Option<FileSystem>,
    disk: Disk,
    /// Bytes a second that one thread and all of them read from memory.
    bandwidth: (f64, f64),
    threads: usize,
    /// What may be locked, bytes; `None`: no limit.
    lockable: Option<u64>,
    process: Option<Process>,
    outlook: Option<Outlook>,
}

/// Measures and prints, in well under a minute.
///
/// # Errors
/// A file that is no Mixture-of-Experts model or cannot be read, a profile of
/// another model, a process that is not there.
pub fn main(args: &Args) -> Result<(), Box<dyn Error>> {
    // What may be wrong with the command line first.
    let map = args.model.as_deref().map(read_map).transpose()?;
    let memory = Memory::now()?;
    let ram = Ram::bytes(args.ram.as_ref())?;
    let threads = default_threads() as usize;
    let label = if args.ram.is_some() { "as asked" } else { "what is free" };
    let profile = args.profile.as_deref();
    let outlook = match (&args.model, &map) {
        (Some(path), Some(map)) => Some(Outlook::new(path, map, profile, ram, label)?),
        _ => None,
    };
    let process = match args.pid {
        Some(pid) => Some(process::watch(pid, memory.total)?),
        None => None,
    };
    // Before measuring: pressure should be others'.
    let machine = Machine::now();

    let bar = style::bar("Measuring memory", 10);
    let bandwidth = memory::bandwidth(threads, memory.available)?;
    bar.set_position(1);
    bar.set_message("Measuring the disk");
    let (disk, file_system) = measure_disk(map.as_ref())?;
    bar.finish_and_clear();
    let rates = Rates { memory: bandwidth.0.max(bandwidth.1), disk: disk.own_rate() };
    let findings = Findings {
        machine,
        memory,
        file_system,
        disk,
        bandwidth,
        threads,
        lockable: lockable_bytes(),
        process,
        outlook: outlook.map(|outlook| outlook.with_speeds(rates)),
    };
    let advice = give_advice(&findings, rates);
    Ok(report::print(args.json, &findings, &advice)?)
}

/// Reads the model, or a file written for that.
fn measure_disk(map: Option<&ExpertMap>) -> Result<(Disk, Option<FileSystem>), Box<dyn Error>> {
    if let Some(map) = map {
        let parts = map.layers().iter().flat_map(|layer| &layer.parts);
        let (count, bytes) = parts.fold((0, 0), |(n, sum), part| (n + 1, sum + part.bytes));
        let disk = disk::measure(map.files(), usize::try_from(bytes / count.max(1))?)?;
        return Ok((disk, map.files().first().and_then(|f| FileSystem::of(&f.path))));
    }
    let (_file, model, folder) = disk::temporary().map_err(|e| {
        format!(
            "cannot write a file to read: {e}; go to a folder with room or give a model with -m"
        )
    })?;
    let disk = disk::measure(&[model], USUAL_RUN)?;
    Ok((disk, FileSystem::of(&folder)))
}

fn give_advice(findings: &Findings, rates: Rates) -> Advice {
    let (huge, used) = findings.disk.huge;
    advise(&Situation {
        model: findings.outlook.as_ref().map(|outlook| outlook.case),
        rates,
        network: findings.file_system.as_ref().filter(|f| f.network).map(|f| f.kind.clone()),
        huge_pages: 2 * huge >= used,
        swap: findings.machine.swap,
        lockable: findings.lockable,
        pressure: findings.machine.pressure.map_or(0.0, |(some, _)| some),
        available: findings.memory.available as f64 / findings.memory.total.max(1) as f64,
    })
}
