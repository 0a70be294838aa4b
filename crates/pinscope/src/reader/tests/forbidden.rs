//! Where the kernel forbids something, a reader says so and works.

use super::*;

/// Makes `io_uring_setup` fail with `EPERM` for the calling thread and its
/// children, as the seccomp filter of a container does.
fn forbid_io_uring() {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut program = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // system call number
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_io_uring_setup as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a well-formed filter that lives through the call; it binds this
    // thread only.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &filter), 0);
    }
}

#[test]
fn auto_falls_back_to_threads_and_says_why_where_io_uring_is_forbidden() {
    let in_own_thread = || {
        forbid_io_uring();
        let f = Fixture::new(50_000);
        let arena = arena(1);
        let refused = open_reader(f.files(), arena.clone(), ReaderKind::Uring, serial());
        assert!(matches!(refused, Err(ReadError::Unavailable { .. })));
        let opened = open_reader(f.files(), arena.clone(), ReaderKind::Auto, serial());
        let (mut reader, notes) = opened.unwrap();
        assert_eq!(reader.name(), "pread");
        assert!(notes.iter().any(|n| n.contains("kernel.io_uring_disabled")), "{notes:?}");
        read_one(&mut *reader, demand(5, 49_995)).unwrap();
        assert_in_place(&f, &arena, &demand(5, 49_995));
    };
    std::thread::spawn(in_own_thread).join().unwrap();
}

/// Takes CAP_IPC_LOCK, which lifts RLIMIT_MEMLOCK, from the calling thread.
fn drop_cap_ipc_lock() {
    const VERSION_3: u32 = 0x2008_0522;
    const CAP_IPC_LOCK: u32 = 14;
    let mut header = [VERSION_3, 0u32];
    let mut sets = [[0u32; 3]; 2];
    // SAFETY: header and sets have the layout of capability version 3; they
    // bind this thread only.
    unsafe {
        let (h, s) = (header.as_mut_ptr(), sets.as_mut_ptr());
        assert_eq!(libc::syscall(libc::SYS_capget, h, s), 0);
        (*s)[0] &= !(1 << CAP_IPC_LOCK); // effective
        assert_eq!(libc::syscall(libc::SYS_capset, h, s), 0);
    }
}

#[test]
fn a_low_memlock_limit_costs_registration_and_nothing_else() {
    let in_own_thread = || {
        drop_cap_ipc_lock();
        if memlock_at_most(8 << 20).is_none() {
            return; // not lowered in a process that other tests share
        }
        let f = Fixture::new(500_000);
        let arena = arena(64 << 20);
        let opened = open_reader(f.files(), arena.clone(), ReaderKind::Uring, serial());
        let Ok((mut reader, notes)) = opened else {
            return; // no io_uring here
        };
        assert!(notes.iter().any(|n| n.contains("RLIMIT_MEMLOCK")), "{notes:?}");
        read_one(&mut *reader, demand(5, 499_995)).unwrap();
        assert_in_place(&f, &arena, &demand(5, 499_995));
        arena.release(0..arena.len()).unwrap();
    };
    std::thread::spawn(in_own_thread).join().unwrap();
}

/// The limit, if it is low enough for the test.
fn memlock_at_most(most: u64) -> Option<u64> {
    Some(crate::arena::memlock_limit()).filter(|&l| l <= most)
}
