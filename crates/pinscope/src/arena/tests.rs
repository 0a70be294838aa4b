use super::*;

fn resident_pages(arena: &Arena) -> usize {
    let mut seen = vec![0u8; arena.len() / 4096];
    // SAFETY: the arena's own mapping and one byte for each page of it.
    let rc = unsafe { libc::mincore(arena.ptr(0).cast(), arena.len(), seen.as_mut_ptr()) };
    assert_eq!(rc, 0);
    seen.iter().filter(|&&s| s & 1 == 1).count()
}

#[test]
fn a_new_arena_is_aligned_rounded_up_and_takes_no_memory() {
    for len in [1, HUGE_PAGE, HUGE_PAGE + 1, 70 << 20] {
        let arena = Arena::new(len).unwrap();
        assert_eq!(arena.ptr(0) as usize % HUGE_PAGE, 0);
        assert_eq!(arena.len(), len.div_ceil(HUGE_PAGE) * HUGE_PAGE);
        assert_eq!(resident_pages(&arena), 0);
    }
}

#[test]
fn released_pages_are_gone_and_the_others_stay() {
    let arena = Arena::new(4 * HUGE_PAGE).unwrap();
    // SAFETY: the test is the only user.
    unsafe { arena.ptr(0).write_bytes(7, arena.len()) };
    arena.release(HUGE_PAGE..2 * HUGE_PAGE).unwrap();
    assert_eq!(resident_pages(&arena), 3 * HUGE_PAGE / 4096);
    // SAFETY: as above.
    let bytes = unsafe { arena.bytes(0..arena.len()) };
    assert!(bytes[HUGE_PAGE..2 * HUGE_PAGE].iter().all(|&b| b == 0));
    assert!(bytes[..HUGE_PAGE].iter().all(|&b| b == 7));
    assert!(bytes[2 * HUGE_PAGE..].iter().all(|&b| b == 7));
}

#[test]
fn release_spares_pages_that_are_only_partly_inside() {
    let arena = Arena::new(HUGE_PAGE).unwrap();
    // SAFETY: the test is the only user.
    unsafe { arena.ptr(0).write_bytes(7, arena.len()) };
    arena.release(1..8191).unwrap();
    // SAFETY: as above.
    assert!(unsafe { arena.bytes(0..arena.len()) }.iter().all(|&b| b == 7));
}

#[test]
fn registered_memory_is_not_released() {
    let arena = Arena::new(2 * REGISTER_UNIT).unwrap();
    arena.set_registered(1, true);
    assert!(arena.release(0..REGISTER_UNIT).is_ok());
    let across = REGISTER_UNIT - 4096..REGISTER_UNIT + 4096;
    assert!(matches!(arena.release(across.clone()), Err(ArenaError::Registered { .. })));
    arena.set_registered(1, false);
    assert!(arena.release(across).is_ok());
}

#[test]
fn impossible_sizes_are_errors() {
    assert!(matches!(Arena::new(0), Err(ArenaError::Size { .. })));
    assert!(matches!(Arena::new(usize::MAX), Err(ArenaError::Size { .. })));
    assert!(matches!(Arena::new(1 << 60), Err(ArenaError::Map { .. })));
}

#[test]
#[should_panic(expected = "arena offset")]
fn an_offset_beyond_the_end_panics() {
    Arena::new(1).unwrap().ptr(HUGE_PAGE + 1);
}

#[test]
fn locking_populates_nothing_or_says_which_limit_is_in_the_way() {
    let arena = Arena::new(HUGE_PAGE).unwrap();
    match arena.try_lock(0..arena.len()) {
        Ok(()) => assert_eq!(resident_pages(&arena), 0),
        Err(e) => assert!(e.to_string().contains("RLIMIT_MEMLOCK"), "{e}"),
    }
}

#[test]
fn populating_ahead_takes_memory_and_keeps_what_is_written() {
    let arena = Arc::new(Arena::new(8 * HUGE_PAGE).unwrap());
    // SAFETY: nobody else uses the arena's bytes.
    unsafe { arena.ptr(5 * HUGE_PAGE + 7).write(42) };
    arena.populate_ahead();
    let mut resident = vec![0u8; arena.len() / 4096];
    for _ in 0..1000 {
        // SAFETY: one byte for each page of the arena.
        let rc = unsafe {
            libc::mincore(arena.ptr(0).cast(), arena.len(), resident.as_mut_ptr().cast())
        };
        assert_eq!(rc, 0);
        if resident.iter().all(|r| r & 1 == 1) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(resident.iter().all(|r| r & 1 == 1), "all pages were taken");
    // SAFETY: as above.
    assert_eq!(unsafe { arena.ptr(5 * HUGE_PAGE + 7).read() }, 42);
}
