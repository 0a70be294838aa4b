use super::*;
use crate::layout::PAGE;
use crate::profile::PinPlan;

const CALM: FaultPlan = FaultPlan { seed: 1, delay: 0.0, fail: 0.0, retry: 0.0, reorder: false };

/// Pages of the arena that are in RAM, bytes.
fn in_ram(r: &Residency) -> u64 {
    let mut seen = vec![0u8; r.arena.len() / PAGE as usize];
    // SAFETY: the arena's own mapping, and a byte for each of its pages.
    let rc = unsafe { libc::mincore(r.arena.ptr(0).cast(), r.arena.len(), seen.as_mut_ptr()) };
    assert_eq!(rc, 0);
    seen.iter().filter(|&&s| s & 1 == 1).count() as u64 * PAGE
}

#[test]
fn memory_given_back_is_gone_and_the_hottest_experts_stay() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let mut r = residency(&map, Layout::full_bytes(&map) * 9 / 10, CALM);
    // SAFETY: nothing is read or computed yet.
    unsafe { r.arena.ptr(0).write_bytes(1, r.arena.len()) };
    // Expert 5 of both layers is the hottest, and has one of the last slots.
    for expert in [0, 1, 2, 3, 4, 5, 5, 5, 5, 5] {
        pass(&mut r, &file, 0, &[expert]).unwrap();
        pass(&mut r, &file, 2, &[expert]).unwrap();
    }
    let before = in_ram(&r);
    let given = r.give_back(6 * 28_672).unwrap();
    assert!(given >= 6 * 28_672);
    assert_eq!(in_ram(&r), before - given);
    assert_eq!(r.stats().given_back, given);

    let counted = r.stats().decode;
    pass(&mut r, &file, 0, &[5]).unwrap();
    pass(&mut r, &file, 2, &[5]).unwrap();
    assert_eq!(r.stats().decode.since(&counted).misses, 0);
}

#[test]
fn one_layers_need_is_never_given_back() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let mut r = residency(&map, Layout::full_bytes(&map) * 9 / 10, CALM);
    r.give_back(u64::MAX).unwrap();
    let again = r.give_back(u64::MAX).unwrap();
    assert_eq!(again, 0);
    for layer in 0..3 {
        pass(&mut r, &file, layer, &[0, 1, 2, 3, 4, 5]).unwrap();
    }
}

#[test]
fn what_was_given_back_can_be_taken_again() {
    let dir = tempfile::tempdir().unwrap();
    let (map, file) = model(dir.path());
    let mut r = residency(&map, Layout::full_bytes(&map) * 9 / 10, CALM);
    let given = r.give_back(200_000).unwrap();
    assert_eq!(r.take_again(u64::MAX), given);
    assert_eq!((r.stats().given_back, r.take_again(u64::MAX)), (0, 0));
    for expert in [0, 1, 2, 3, 4, 5, 0, 1, 2, 3] {
        pass(&mut r, &file, 0, &[expert]).unwrap();
    }
    assert!(r.stats().decode.hits >= 4);
}

proptest! {
    #[test]
    fn experts_keep_their_bytes_while_memory_comes_and_goes(
        passes in passes(), permille in 300u64..1000, seed: u64, share in 0.0..=1.0f64,
        amounts in prop::collection::vec(0u64..300_000, 30),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (map, file) = model(dir.path());
        let arena = Layout::min_bytes(&map).max(Layout::full_bytes(&map) * permille / 1000);
        let faults = FaultPlan { seed, delay: 0.3, fail: 0.0, retry: 0.1, reorder: true };
        let mut r = residency(&map, arena, faults);
        let rate = (0..18).map(|i| f64::from(i % 5) / 10.0).collect();
        r.pin(&PinPlan { pins: Vec::new(), share, promise: 0.9, rate, flat: false }, true);
        for ((layer, experts), amount) in passes.iter().zip(amounts) {
            match amount % 3 {
                0 => drop(r.give_back(amount).unwrap()),
                1 => drop(r.take_again(amount)),
                _ => {}
            }
            pass(&mut r, &file, *layer, experts).unwrap();
        }
    }
}
