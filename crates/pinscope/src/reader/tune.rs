//! Which sizes of reads suit the device that a model lies on: measured on the
//! model's own bytes while the program starts.
//!
//! Devices are noisy, and what was measured in less than half a second is to
//! be taken with care: the default stays unless something else was faster in
//! each single round than the default in any.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::places::Places;
use super::{
    open_reader, ModelFiles, ReadClass, ReadError, ReadRequest, Reader, ReaderKind, ReaderOptions,
};
use crate::arena::Arena;

/// No round is begun that would probably end after this.
const TIME: Duration = Duration::from_millis(400);
/// Rounds, at most.
const ROUNDS: usize = 4;
/// Bytes that one sample reads, and memory that is taken for it; KV cache and
/// buffers, which are larger, are allocated later.
const SAMPLE: usize = 16 << 20;
/// Below this size of a model nothing is measured: it is read in a moment.
const SMALL: u64 = 1 << 30;
/// Other ways within this share of the best are as good.
const AS_GOOD: f64 = 0.95;

/// Measures in a thread of its own and tells the readers of `files`; `run` is
/// the size of a part of an expert, bytes. Nothing is measured for a small
/// model, and nothing changes where reading fails: who needs the bytes will
/// learn why.
pub fn tune_ahead(files: &Arc<ModelFiles>, kind: ReaderKind, run: usize) {
    if files.lens().sum::<u64>() < SMALL {
        return;
    }
    let files = Arc::clone(files);
    let work = move || {
        if let Ok(Some(options)) = tune(&files, kind, run) {
            files.set_tuned(options);
        }
    };
    // Best effort.
    drop(std::thread::Builder::new().name("tune".into()).spawn(work));
}

/// The options that suit the device best, with the bandwidth that it showed;
/// `None` if it is too slow for a sound measurement in a fraction of a second.
///
/// # Errors
/// What keeps the files from being read.
pub fn tune(
    files: &Arc<ModelFiles>,
    kind: ReaderKind,
    run: usize,
) -> Result<Option<ReaderOptions>, ReadError> {
    let began = Instant::now();
    let Some(places) = Places::new(files.lens(), run.min(SAMPLE)) else { return Ok(None) };
    let slots = SAMPLE / places.run();
    let Ok(arena) = Arena::new(slots * places.run()).map(Arc::new) else { return Ok(None) };
    let open = |options| Ok(open_reader(Arc::clone(files), Arc::clone(&arena), kind, options)?.0);
    let mut first = open(ReaderOptions::default())?;
    // Memory is taken, and the device wakes up.
    sample(first.as_mut(), &places, slots)?;
    let ways = ways(first.name());
    let mut readers = vec![first];
    for &way in &ways[1..] {
        readers.push(open(way)?);
    }
    let mut samples = vec![Vec::new(); ways.len()];
    for round in 1..=ROUNDS {
        for (reader, samples) in readers.iter_mut().zip(&mut samples) {
            samples.push(sample(reader.as_mut(), &places, slots)?);
        }
        if began.elapsed() * (round as u32 + 1) / round as u32 > TIME {
            break;
        }
    }
    Ok(choose(&samples).map(|(way, rate)| ReaderOptions { bandwidth: rate as u64, ..ways[way] }))
}

/// What is tried: the default, then others from the one that is least in the
/// way of other reads to the one that is most.
fn ways(reader: &str) -> Vec<ReaderOptions> {
    let default = ReaderOptions::default();
    let way = |chunk, lanes| match reader {
        "pread" => ReaderOptions { chunk, threads: lanes, ..default },
        _ => ReaderOptions { chunk, depth: lanes, ..default },
    };
    match reader {
        // Smaller preads cost more than twice the CPU and are no faster.
        "pread" => vec![default, way(1 << 20, 2), way(4 << 20, 4)],
        _ => {
            vec![default, way(1 << 20, 4), way(256 << 10, 16), way(256 << 10, 64), way(4 << 20, 4)]
        }
    }
}

/// The best of some ways by their samples (bytes a second, as many of each),
/// the first one being the default, and its bandwidth; `None` without two
/// samples of each.
fn choose(samples: &[Vec<f64>]) -> Option<(usize, f64)> {
    let default = samples.first().filter(|s| s.len() >= 2)?;
    let most = default.iter().copied().fold(0.0, f64::max);
    let surely_better = |s: &[f64]| s.iter().all(|&rate| rate * AS_GOOD > most);
    let better = || (1..samples.len()).filter(|&way| surely_better(&samples[way]));
    let best = better().map(|way| median(&samples[way])).fold(0.0, f64::max);
    let way = better().find(|&way| median(&samples[way]) >= best * AS_GOOD).unwrap_or(0);
    Some((way, median(&samples[way])))
}

/// The middle one, or the lower of the two middle ones.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) / 2]
}

/// Bytes a second of one sample.
fn sample(reader: &mut dyn Reader, places: &Places, slots: usize) -> Result<f64, ReadError> {
    let start = Instant::now();
    for slot in 0..slots {
        let (file, offset) = places.next();
        let (len, dest) = (places.run(), slot * places.run());
        let class = ReadClass::Demand;
        reader.submit(ReadRequest { tag: 0, file, offset, len, dest, class })?;
    }
    reader.kick();
    let mut done = Vec::with_capacity(slots);
    while reader.outstanding() > 0 {
        reader.reap(&mut done, true)?;
    }
    let took = start.elapsed().as_secs_f64();
    done.into_iter().try_for_each(|read| read.result)?;
    Ok((slots * places.run()) as f64 / took.max(1e-9))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::map::ModelFile;

    proptest! {
        #[test]
        fn noise_of_a_device_for_which_all_is_the_same_keeps_the_default(
            rates in prop::collection::vec(prop::collection::vec(0.8..1.25f64, 2..5), 5),
        ) {
            // Whatever it shows: at worst a way that was better each time.
            let (way, rate) = choose(&rates).unwrap();
            let most = rates[0].iter().copied().fold(0.0, f64::max);
            prop_assert!(way == 0 || rates[way].iter().all(|&r| r > most / 0.95));
            prop_assert!(rates[way].contains(&rate));
        }
    }

    #[test]
    fn a_way_that_is_clearly_faster_is_taken_and_of_several_the_least_in_the_way() {
        let slow = vec![1.0, 1.1, 0.4];
        let samples = [slow.clone(), slow.clone(), vec![2.0, 2.1, 1.9], vec![2.05, 2.1, 2.0]];
        assert_eq!(choose(&samples), Some((2, 2.0)));
        let samples = [slow.clone(), vec![1.3, 1.3, 1.3], vec![2.0, 2.0, 2.0], slow.clone()];
        assert_eq!(choose(&samples), Some((2, 2.0)));
        // One lucky sample of the default is doubt enough.
        let samples = [vec![1.0, 2.0, 0.4], vec![2.0, 2.1, 1.9]];
        assert_eq!(choose(&samples), Some((0, 1.0)));
        assert_eq!(choose(&[vec![1.0], vec![5.0]]), None);
    }

    #[test]
    fn a_real_file_is_measured_and_its_readers_hear_of_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(40 << 20).unwrap();
        let model = ModelFile { path: file.path().into(), len: 40 << 20, header_len: 0 };
        let files = Arc::new(ModelFiles::open(&[model]).unwrap());
        for kind in [ReaderKind::Auto, ReaderKind::Pread] {
            let tuned = tune(&files, kind, 900_000).unwrap();
            assert!(tuned.is_none_or(|t| t.bandwidth > 1_000_000), "{tuned:?}");
        }
        tune_ahead(&files, ReaderKind::Auto, 900_000);
        assert_eq!(files.tuned(), None, "a small model was measured");
        files.set_tuned(ReaderOptions { chunk: 8192, ..ReaderOptions::default() });
        assert_eq!(files.tuned().map(|t| t.chunk), Some(8192));
    }

    #[test]
    fn a_file_that_was_cut_short_ends_the_measurement_as_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(40 << 20).unwrap();
        let model = ModelFile { path: file.path().into(), len: 40 << 20, header_len: 0 };
        let files = Arc::new(ModelFiles::open(&[model]).unwrap());
        file.as_file().set_len(4096).unwrap();
        assert!(tune(&files, ReaderKind::Auto, 900_000).is_err());
    }
}
