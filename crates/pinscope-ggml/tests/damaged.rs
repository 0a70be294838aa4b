//! Headers with random damage: an error or a map, never a crash.

mod common;

use std::os::unix::fs::FileExt;

use pinscope_ggml::read_map;
use pinscope_models::synth::ExpertTypes;

#[test]
fn a_damaged_header_is_an_error_or_a_map_that_stays_inside_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = common::model(dir.path(), "tiny-qwen3moe", ExpertTypes::Shape);
    let map = read_map(&path).unwrap();
    let first = map.layers().iter().flat_map(|l| &l.parts).map(|p| p.offset).min().unwrap();
    let header = {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.truncate(first as usize);
        bytes
    };
    let len = std::fs::metadata(&path).unwrap().len();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut state = 1u64;
    let mut random = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut refused, mut accepted) = (0, 0);
    for round in 0..400 {
        let mut damaged = header.clone();
        for _ in 0..=random(4) {
            // Half of it near the start, where counts and keys are.
            let at = if round % 2 == 0 { random(2000) } else { random(damaged.len()) };
            damaged[at] = random(256) as u8;
        }
        file.write_all_at(&damaged, 0).unwrap();
        match read_map(&path) {
            Err(e) => {
                refused += 1;
                assert!(!e.to_string().is_empty());
            }
            Ok(map) => {
                accepted += 1;
                for p in map.layers().iter().flat_map(|l| &l.parts) {
                    assert!(p.offset + p.bytes <= len);
                }
            }
        }
    }
    assert!(refused > 20 && accepted > 20, "{refused} refused, {accepted} accepted");
}
