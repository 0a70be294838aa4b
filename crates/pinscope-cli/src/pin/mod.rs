//! `pinscope pin`: keeps a model's dense tensors and hottest experts in the page
//! cache, where any program that maps the same file finds them.

mod report;

use std::error::Error;
use std::path::PathBuf;

use pinscope::map::ExpertMap;
use pinscope::memory::{format_bytes, Memory};
use pinscope::pin::{
    lockable_bytes, page_size, read_ahead, Advert, FileRanges, LockError, LockedRanges, Selection,
    HOW_TO_RAISE,
};
use pinscope::policy::ExpertId;
use pinscope::profile::{Profile, ProfiledModel};
use pinscope_ggml::read_map;

use crate::ram::Ram;
use crate::signals::StopSignals;
use crate::style;

/// Options of `pinscope pin`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The GGUF file; the first one if the model has several parts
    #[arg(short, long, value_name = "FILE")]
    model: PathBuf,
    /// Which experts are hot, from `pinscope profile`; without it only dense
    /// tensors are kept, unless the whole model fits
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Most memory to keep pages in: 8G, 8000M, 40%
    #[arg(long, value_name = "AMOUNT")]
    ram: Ram,
    /// Read what fits in --ram and may not be locked into the page cache too,
    /// where the kernel may drop it again
    #[arg(long)]
    warm: bool,
    /// Print one JSON object when everything is locked
    #[arg(long)]
    json: bool,
}

/// What is kept, and what the user should know of it.
struct Outcome {
    locked: Selection,
    /// Pages that are read ahead without being locked.
    warm: FileRanges,
    warm_experts: Vec<ExpertId>,
    /// `None`: no limit on locked memory.
    lockable: Option<u64>,
    notes: Vec<String>,
}

/// Locks, says what is locked and waits for a signal to release it.
///
/// # Errors
/// A file that is no Mixture-of-Experts model, a profile of another one, more
/// memory than is free, a model that another process pins, and whatever the
/// kernel refuses.
pub fn main(args: &Args) -> Result<(), Box<dyn Error>> {
    let signals = StopSignals::hold()?;
    let map = read_map(&args.model)?;
    let model = ProfiledModel::of(&map)
        .map_err(|e| format!("cannot read the header of {}: {e}", args.model.display()))?;
    let profile =
        args.profile.as_deref().map(|path| Profile::load_for(path, &model)).transpose()?;
    let ram = Ram::bytes(Some(&args.ram))?;
    let outcome = choose(&map, profile.as_ref(), ram, args.warm);
    check_room(&outcome)?;

    let mut advert = Advert::claim(model.id, map.files())?;
    let locked = with_bar("Locking", outcome.locked.bytes(), &signals, |progress| {
        LockedRanges::lock(map.files(), &outcome.locked.ranges(), progress)
    });
    let Some(_locked) = unless_stopped(locked)? else { return Ok(()) };
    let warmed = with_bar("Reading ahead", size(&outcome.warm), &signals, |progress| {
        read_ahead(map.files(), &outcome.warm, progress)
    });
    if unless_stopped(warmed)?.is_none() {
        return Ok(());
    }
    advert.publish(outcome.locked.experts())?;
    report::print(args, &map, &model, profile.as_ref(), &outcome)?;
    signals.wait();
    Ok(())
}

/// Chooses what is locked and what is only read ahead within `ram` bytes.
fn choose(map: &ExpertMap, profile: Option<&Profile>, ram: u64, warm: bool) -> Outcome {
    let page = page_size();
    let everything: Vec<ExpertId> = map.expert_ids().collect();
    let fits =
        Selection::new(map, &everything, ram, page).experts().len() as u64 == map.expert_count();
    let order = match profile {
        Some(profile) => {
            // Experts that the profile never saw come last, as the file has them.
            let mut order = profile.hottest();
            order.extend(&everything);
            order
        }
        None if fits => everything,
        None => Vec::new(),
    };
    let lockable = lockable_bytes();
    let budget = lockable.map_or(ram, |limit| limit.min(ram));
    let locked = Selection::new(map, &order, budget, page);
    let mut all = locked.clone();
    all.extend(map, &order, ram);

    let mut notes = Vec::new();
    if profile.is_none() && !fits {
        notes.push(
            "Without --profile nobody knows which experts are hot, so only dense tensors are \
             kept. `pinscope profile` makes a profile."
                .to_owned(),
        );
    }
    if all.bytes() > locked.bytes() {
        notes.push(format!(
            "Only {} of {} are locked, because of the limit on locked memory (RLIMIT_MEMLOCK): \
             {HOW_TO_RAISE}.",
            format_bytes(locked.bytes()),
            format_bytes(all.bytes())
        ));
    }
    if !all.dense_complete() {
        notes.push(format!(
            "--ram {} is less than the dense tensors need ({}), and every token needs all of them.",
            format_bytes(ram),
            format_bytes(map.dense_bytes())
        ));
    }
    let (warm, warm_experts) = match warm {
        true => {
            let experts = all.experts()[locked.experts().len()..].to_vec();
            (all.beyond(&locked.ranges()), experts)
        }
        false => (Vec::new(), Vec::new()),
    };
    Outcome { locked, warm, warm_experts, lockable, notes }
}

/// Whether the machine can spare what would be locked.
fn check_room(outcome: &Outcome) -> Result<(), Box<dyn Error>> {
    let wanted = outcome.locked.bytes();
    if wanted == 0 {
        let limit = format_bytes(outcome.lockable.unwrap_or(0));
        return Err(format!(
            "nothing can be locked: --ram or the limit on locked memory (RLIMIT_MEMLOCK, {limit}) \
             is below one page; {HOW_TO_RAISE}"
        )
        .into());
    }
    let room = Memory::now()?.default_ram();
    if wanted > room {
        return Err(format!(
            "{} would be locked, but only {} are free, less a margin for other programs; use a \
             --ram of at most {}M",
            format_bytes(wanted),
            format_bytes(room),
            room >> 20
        )
        .into());
    }
    Ok(())
}

/// Runs `work` with a progress bar; a signal stops it.
fn with_bar<T>(
    what: &'static str,
    total: u64,
    signals: &StopSignals,
    work: impl FnOnce(&mut dyn FnMut(u64) -> bool) -> T,
) -> T {
    let bar = style::bar(what, total);
    let result = work(&mut |done| {
        bar.set_position(done);
        !signals.arrived()
    });
    bar.finish_and_clear();
    result
}

/// `None` if a signal ended the work: that is what the user wanted.
fn unless_stopped<T>(result: Result<T, LockError>) -> Result<Option<T>, LockError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(LockError::Stopped) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Bytes of all ranges.
fn size(ranges: &FileRanges) -> u64 {
    ranges.iter().flatten().map(|r| r.end - r.start).sum()
}
