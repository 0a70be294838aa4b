//! Programs that know nothing of PinScope compute the same bits with the
//! library as without it, and run as ever where it cannot help.

mod common;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{library, Program};
use pinscope::profile::{Profile, ProfiledModel, RoutingCounts};
use pinscope_ggml::read_map;
use pinscope_models::gguf::{Header, Value};
use pinscope_models::synth::{self, Shape};

/// Not a test: what the others run, in a process of its own.
#[test]
#[ignore = "run by the other tests"]
fn program() {
    common::program();
}

/// A folder on a disk: the page cache of a RAM disk is no cache.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn model(dir: &Path, shape: &str) -> PathBuf {
    let out = dir.join(format!("{shape}.gguf"));
    let shape = Shape::named(shape).unwrap();
    synth::write(&shape, &synth::Options::default(), &out, &mut |_, _| {}).unwrap();
    out
}

/// What the program computes without the library.
fn plain(models: &[&Path]) -> Vec<String> {
    let out = Program::new(models).run();
    assert!(!out.log.contains("PinScope"), "{}", out.log);
    assert!(out.results.iter().all(|r| r.len() == 64), "{out:?}");
    out.results
}

/// A budget in which few experts fit: what the library itself names as the
/// smallest one, and a little for what differs between runs.
fn small_budget(model: &Path) -> String {
    let refused = Program::new(&[model]).plugin("1M").run();
    assert!(refused.results[0].starts_with("failed"), "{refused:?}");
    let (_, rest) = refused.log.split_once("smallest value that works is ").expect(&refused.log);
    let mib: u64 = rest.split_once('M').unwrap().0.parse().unwrap();
    assert_eq!(refused.log.matches("too little").count(), 1, "said once: {}", refused.log);
    format!("{}M", mib + 2)
}

/// Share of decode's experts that were in memory, percent.
fn hit_rate(log: &str) -> f64 {
    let (_, rest) = log.split_once(" one by one; ").expect(log);
    let (_, rest) = rest.split_once("% and ").expect(log);
    rest.split_once(' ').unwrap().0.parse().unwrap()
}

#[test]
fn logits_under_a_small_budget_are_those_of_the_plain_program() {
    let dir = folder();
    for shape in ["tiny-qwen3moe", "tiny-gpt-oss"] {
        let model = model(dir.path(), shape);
        let out = Program::new(&[&model]).plugin(&small_budget(&model)).run();
        assert_eq!(out.results, plain(&[&model]), "{shape}");
        assert_eq!(out.log.matches("takes over").count(), 1, "{}", out.log);
        assert!(hit_rate(&out.log) < 99.0, "the budget was felt: {}", out.log);
    }
}

#[test]
fn with_enough_memory_every_expert_is_loaded_at_once() {
    let dir = folder();
    let model = model(dir.path(), "tiny-qwen3moe");
    let out = Program::new(&[&model]).plugin("4G").run();
    assert_eq!(out.results, plain(&[&model]));
    assert!((hit_rate(&out.log) - 100.0).abs() < 0.01, "{}", out.log);
}

#[test]
fn a_model_that_is_freed_and_loaded_again_and_another_after_it_are_taken_over() {
    let dir = folder();
    let (a, b) = (model(dir.path(), "tiny-qwen3moe"), model(dir.path(), "tiny-mixtral"));
    let models = [&*a, &*a, &*b, &*a];
    let out = Program::new(&models).plugin("4G").run();
    assert_eq!(out.results, plain(&models));
    assert_eq!(out.log.matches("takes over").count(), 4, "{}", out.log);
    assert_eq!(out.log.matches("one by one").count(), 4, "{}", out.log);
}

#[test]
fn of_two_models_at_once_the_second_is_left_alone_and_named() {
    let dir = folder();
    let (a, b) = (model(dir.path(), "tiny-qwen3moe"), model(dir.path(), "tiny-mixtral"));
    // The same tensor names and sizes, other values.
    let twin = dir.path().join("twin.gguf");
    let options = synth::Options { seed: 99, ..synth::Options::default() };
    synth::write(&Shape::named("tiny-qwen3moe").unwrap(), &options, &twin, &mut |_, _| {}).unwrap();
    let models = [&*a, &*b, &*twin];
    let out = Program::new(&models).plugin("4G").option("together").run();
    assert_eq!(out.results, plain(&models));
    assert_eq!(out.log.matches("takes over").count(), 1, "{}", out.log);
    for left in ["tiny-mixtral.gguf is a second model", "twin.gguf is a second model"] {
        assert_eq!(out.log.matches(left).count(), 1, "{}", out.log);
    }
}

#[test]
fn a_program_that_reads_instead_of_mapping_gets_the_same_bits() {
    let dir = folder();
    let model = model(dir.path(), "tiny-qwen3moe");
    let out = Program::new(&[&model]).plugin(&small_budget(&model)).option("no-mmap").run();
    assert_eq!(out.results, plain(&[&model]));
    assert!(out.log.contains("takes over"), "{}", out.log);
}

#[test]
fn a_model_in_parts_is_found_even_under_names_that_tell_nothing() {
    let dir = folder();
    let whole = model(dir.path(), "tiny-qwen3moe");
    let shape = Shape::named("tiny-qwen3moe").unwrap();
    let options = synth::Options { parts: 3, ..synth::Options::default() };
    let out = dir.path().join("parts.gguf");
    let parts = synth::write(&shape, &options, &out, &mut |_, _| {}).unwrap();
    // As a download cache has it: names that llama.cpp sees are links.
    for (i, part) in parts.iter().enumerate() {
        let blob = dir.path().join(format!("blob{}", 7 - i));
        std::fs::rename(part, &blob).unwrap();
        std::os::unix::fs::symlink(&blob, part).unwrap();
    }
    let out = Program::new(&[&parts[0]]).plugin(&small_budget(&parts[0])).run();
    assert_eq!(out.results, plain(&[&whole]));
    assert!(hit_rate(&out.log) < 99.0, "{}", out.log);
}

#[test]
fn a_file_that_is_no_sound_mixture_of_experts_leaves_the_program_as_it_was() {
    let dir = folder();
    let path = dir.path().join("dense.gguf");
    let shape = Shape::named("tiny-mixtral").unwrap();
    let shape = Shape { dense_layers: shape.layers, ..shape };
    synth::write(&shape, &synth::Options::default(), &path, &mut |_, _| {}).unwrap();
    let mut header = Header::open(&path).unwrap();
    header.set("llama.expert_count", &Value::U32(0));
    header.set("llama.expert_used_count", &Value::U32(0));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&header.to_bytes(), 0).unwrap();
    let out = Program::new(&[&path, &path]).plugin("4G").run();
    assert_eq!(out.results, plain(&[&path, &path]));
    assert_eq!(out.log.matches("PinScope: ").count(), 1, "said once: {}", out.log);
    assert!(out.log.contains("dense.gguf is a dense model"), "{}", out.log);

    let whole = std::fs::read(model(dir.path(), "tiny-qwen3moe")).unwrap();
    let path = dir.path().join("cut.gguf");
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let out = Program::new(&[&path]).plugin("4G").run();
    assert_eq!(out.results, Program::new(&[&path]).run().results);
    assert!(!out.log.contains("takes over"), "{}", out.log);
}

/// A profile that says that experts `hot` of each layer get all the traffic.
fn profile(model: &Path, hot: std::ops::Range<usize>) -> Profile {
    let map = read_map(model).unwrap();
    let mut profile = Profile::new(ProfiledModel::of(&map).unwrap());
    let mut piece = RoutingCounts::new(profile.model().experts());
    let per_layer = map.experts_per_layer() as usize;
    piece.decode.tokens = 100.0;
    for (i, chosen) in piece.decode.chosen.iter_mut().enumerate() {
        *chosen = if hot.contains(&(i % per_layer)) { 100.0 } else { 0.0 };
    }
    profile.record(&piece);
    profile.record(&piece);
    profile
}

#[test]
fn a_profile_pins_experts_and_one_of_another_model_is_refused() {
    let dir = folder();
    let (model, other) = (model(dir.path(), "tiny-qwen3moe"), model(dir.path(), "tiny-mixtral"));
    let path = dir.path().join("a.profile");
    profile(&model, 0..2).save(&path).unwrap();
    let ram = small_budget(&model);
    let out = Program::new(&[&model]).plugin(&ram).env("PINSCOPE_PROFILE", &path).run();
    assert_eq!(out.results, plain(&[&model]));
    assert!(out.log.contains("PinScope: pins the "), "{}", out.log);

    profile(&other, 0..2).save(&path).unwrap();
    let out = Program::new(&[&model]).plugin(&ram).env("PINSCOPE_PROFILE", &path).run();
    assert_eq!(out.results, plain(&[&model]));
    assert!(out.log.contains("the profile is of another model"), "{}", out.log);
    assert!(!out.log.contains("PinScope: pins"), "{}", out.log);
}

/// Pages that the model's tensors touch, of expert tensors only what the
/// experts `hot` need, as joined ranges.
fn pages(model: &Path, hot: std::ops::Range<u64>) -> Vec<(u64, u64)> {
    let header = Header::open(model).unwrap();
    let mut pages = std::collections::BTreeSet::new();
    for (i, tensor) in header.tensors().iter().enumerate() {
        let (at, len) = (header.file_offset(i), tensor.bytes() as u64);
        let (start, end) = if tensor.name.contains("_exps") {
            let one = len / tensor.ne[2];
            (at + hot.start * one, at + hot.end * one)
        } else {
            (at, at + len)
        };
        pages.extend(start / 4096..end.div_ceil(4096));
    }
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for page in pages {
        match ranges.last_mut() {
            Some(last) if last.1 == page * 4096 => last.1 += 4096,
            _ => ranges.push((page * 4096, (page + 1) * 4096)),
        }
    }
    ranges
}

#[test]
fn mapped_mode_locks_exactly_the_pages_of_dense_tensors_and_hot_experts() {
    let dir = folder();
    let model = model(dir.path(), "tiny-qwen3moe");
    let path = dir.path().join("a.profile");
    profile(&model, 3..5).save(&path).unwrap();
    let want = pages(&model, 3..5);
    let bytes: u64 = want.iter().map(|(a, b)| b - a).sum();
    let out = Program::new(&[&model])
        .plugin(&format!("{}K", bytes / 1024))
        .env("PINSCOPE_MODE", "mapped")
        .env("PINSCOPE_PROFILE", &path)
        .option("locked")
        .run();
    assert_eq!(out.results, plain(&[&model]));
    if out.log.contains("may be locked") {
        return eprintln!("not tested here: {}", out.log);
    }
    let mut locked = out.locked.clone();
    locked.sort_unstable();
    assert_eq!(locked, want, "{}", out.log);
}

#[test]
fn a_wrong_setting_is_named_and_the_program_runs_without() {
    let dir = folder();
    let model = model(dir.path(), "tiny-mixtral");
    let out = Program::new(&[&model]).plugin("plenty").run();
    assert_eq!(out.results, plain(&[&model]));
    assert!(out.log.contains("PINSCOPE_RAM") && out.log.contains("plenty"), "{}", out.log);
}

#[test]
fn preloaded_it_keeps_the_file_from_being_read_at_load_and_else_drops_it_after() {
    let dir = folder();
    let path = model(dir.path(), "tiny-qwen3moe");
    let cold = |program: Program| {
        let file = std::fs::File::open(&path).unwrap();
        file.sync_all().unwrap();
        // SAFETY: an open descriptor; the whole file.
        unsafe {
            libc::posix_fadvise(
                std::os::fd::AsRawFd::as_raw_fd(&file),
                0,
                0,
                4, /* DONTNEED */
            );
        }
        program.run()
    };
    let pages = (std::fs::metadata(&path).unwrap().len() / 4096) as usize;
    let ram = small_budget(&path);
    let without = cold(Program::new(&[&path]).plugin(&ram));
    let with = cold(Program::new(&[&path]).plugin(&ram).env("LD_PRELOAD", library()));
    assert_eq!(with.results, without.results);
    assert!(without.cached[0] > pages * 9 / 10, "llama.cpp reads all: {:?}", without.cached);
    assert!(with.cached[0] < pages / 4, "{:?} of {pages} pages", with.cached);
}

#[test]
fn preloaded_into_programs_without_ggml_it_does_nothing() {
    let out = Command::new("sh")
        .args(["-c", "cat /proc/self/status | head -1 && test -n \"$LD_PRELOAD\""])
        .env("LD_PRELOAD", library())
        .env("LD_BIND_NOW", "1")
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    assert_eq!((&*out.stdout, &*out.stderr), (&b"Name:\tcat\n"[..], &b""[..]));
}
