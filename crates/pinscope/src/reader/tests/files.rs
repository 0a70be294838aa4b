//! Files that are cut, changed, not there, or read through the page cache.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use super::*;

#[test]
fn buffered_files_and_tmpfs_are_read_correctly_and_buffering_is_noted_once() {
    let shm = PathBuf::from("/dev/shm");
    let places = [std::env::temp_dir(), shm];
    for place in places.iter().filter(|p| p.is_dir()) {
        let f = Fixture::within(place, 300_001);
        let direct = f.files();
        let twice = [f.model(), f.model()].concat();
        let buffered = Arc::new(ModelFiles::open_buffered(&twice).unwrap());
        for files in [direct, buffered] {
            for kind in kinds() {
                let arena = arena(1 << 20);
                let opened = open_reader(files.clone(), arena.clone(), kind, serial());
                let (mut reader, notes) = opened.unwrap();
                let about = notes.iter().filter(|n| n.contains("O_DIRECT")).count();
                assert_eq!(about, files.notes().len());
                assert!(files.count() == 1 || about == 1);
                let r = demand(77, 300_001 - 77);
                read_one(&mut *reader, r).unwrap();
                assert_in_place(&f, &arena, &r);
            }
        }
    }
}

#[test]
fn what_was_read_through_the_page_cache_does_not_stay_in_it() {
    let f = Fixture::within(&std::env::temp_dir(), 1 << 20);
    fs::File::open(&f.path).unwrap().sync_all().unwrap();
    let files = Arc::new(ModelFiles::open_buffered(&f.model()).unwrap());
    let cached = || {
        let file = fs::File::open(&f.path).unwrap();
        let len = 1 << 20;
        let mut seen = vec![0u8; len / ALIGN];
        // SAFETY: a fresh read-only mapping of the file, unmapped again.
        unsafe {
            use std::os::fd::AsRawFd;
            let (prot, flags) = (libc::PROT_READ, libc::MAP_SHARED);
            let at = libc::mmap(std::ptr::null_mut(), len, prot, flags, file.as_raw_fd(), 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mincore(at, len, seen.as_mut_ptr()), 0);
            libc::munmap(at, len);
        }
        seen.iter().filter(|&&s| s & 1 == 1).count()
    };
    for kind in kinds() {
        let arena = arena(1 << 20);
        let mut reader = open(files.clone(), &arena, kind, ReaderOptions::default());
        fs::read(&f.path).unwrap();
        if cached() != 256 {
            return; // a file system without a page cache of its own
        }
        read_one(&mut *reader, demand(0, 1 << 20)).unwrap();
        assert_in_place(&f, &arena, &demand(0, 1 << 20));
        assert_eq!(cached(), 0);
    }
}

#[test]
fn a_file_cut_short_while_open_ends_as_truncated() {
    for kind in kinds() {
        for cut in [0, 8192, 10_000, 299_000] {
            let f = Fixture::new(300_001);
            let arena = arena(1 << 20);
            let mut reader = open(f.files(), &arena, kind, serial());
            let file = fs::File::options().write(true).open(&f.path).unwrap();
            file.set_len(cut).unwrap();
            let result = read_one(&mut *reader, demand(7, 299_990));
            assert!(
                matches!(result, Err(ReadError::Truncated { .. })),
                "{kind:?} {cut}: {result:?}"
            );
        }
    }
}

#[test]
fn a_file_written_to_while_open_ends_as_changed_even_where_its_bytes_are_all_there() {
    for kind in kinds() {
        let f = Fixture::new(100_000);
        let arena = arena(1 << 20);
        let mut reader = open(f.files(), &arena, kind, ReaderOptions::default());
        read_one(&mut *reader, demand(0, 5000)).unwrap();
        let file = fs::File::options().write(true).open(&f.path).unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(3)).unwrap();
        let result = read_one(&mut *reader, demand(0, 5000));
        assert!(matches!(result, Err(ReadError::Changed { .. })), "{result:?}");
        file.set_len(200_000).unwrap();
        let result = read_one(&mut *reader, demand(0, 5000)).unwrap_err();
        assert!(result.to_string().contains("200000 bytes now"), "{result}");
    }
}

#[test]
fn a_missing_file_and_a_wrong_length_are_refused_at_opening() {
    let f = Fixture::new(1000);
    let mut model = f.model();
    model[0].len += 1;
    let e = ModelFiles::open(&model).unwrap_err();
    assert!(matches!(e, ReadError::Changed { .. }), "{e}");
    model[0].path.set_extension("gone");
    let e = ModelFiles::open(&model).unwrap_err();
    assert!(matches!(e, ReadError::Open { .. }), "{e}");
}

#[test]
fn read_into_fills_any_buffer_in_place_or_not() {
    let f = Fixture::new(5_000_003);
    let buffered = ModelFiles::open_buffered(&f.model()).unwrap();
    let mut memory = vec![0u8; 6 << 20];
    let base = memory.as_ptr().align_offset(ALIGN);
    for (offset, len) in [
        (0, 0),
        (1, 1),
        (4095, 2),
        (32, 100),
        (96, 4_000_000),
        (4096, 8192),
        (0, 5_000_003),
        (4_999_000, 1003),
    ] {
        for shift in [offset % ALIGN, 0, 32, 4095] {
            for files in [&*f.files(), &buffered] {
                let dst = &mut memory[base + shift..base + shift + len];
                dst.fill(0);
                files.read_into(0, offset as u64, dst).unwrap();
                assert!(dst == &f.bytes[offset..offset + len], "{offset} {len} {shift}");
            }
        }
    }
    let mut one = [0];
    let beyond = f.files().read_into(0, 5_000_003, &mut one);
    assert!(matches!(beyond, Err(ReadError::Truncated { .. })));
}
