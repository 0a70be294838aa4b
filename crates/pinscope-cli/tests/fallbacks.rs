//! What the system refuses is done another way, with the same result.

mod common;

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Output;

use common::{folder, json, make, program, smallest_ram, stderr, tiny, SHORT};

/// `verify` with half of the experts in memory, in a process that `restrict` has been called in.
fn verify(model: &Path, arguments: &[&str], restrict: fn() -> io::Result<()>) -> Output {
    let ram = format!("{}M", smallest_ram(model, &SHORT) + 6);
    let command = ["verify", "-m", model.to_str().unwrap(), "--ram", &ram];
    let mut command = program(&[&command[..], &SHORT, arguments].concat());
    // SAFETY: the functions below make system calls only, on their own stack.
    unsafe {
        command.pre_exec(restrict);
    }
    command.output().unwrap()
}

fn assert_identical(output: &Output) -> serde_json::Value {
    let verdict = json(output);
    assert_eq!(verdict["identical"], true, "{verdict}");
    assert!(verdict["bytes_read_per_token"].as_f64().unwrap() > 0.0, "nothing was read: {verdict}");
    assert!(output.status.success(), "{}", stderr(output));
    verdict
}

fn nothing() -> io::Result<()> {
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A seccomp filter like those of containers: `io_uring_setup` gives EPERM.
fn forbid_io_uring() -> io::Result<()> {
    let allow = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut filter = [
        // Load the number of the system call; if it is this one, refuse.
        libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: 0x15, jt: 0, jf: 1, k: libc::SYS_io_uring_setup as u32 },
        libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: refuse },
        allow,
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter outlives the call, which copies it.
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        check(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program))
    }
}

/// No locked memory, not for root either.
fn forbid_locked_memory() -> io::Result<()> {
    const CAP_IPC_LOCK: libc::c_ulong = 14;
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: plain system calls. Without privileges there is nothing to drop,
    // so the first may fail.
    unsafe {
        libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0);
        check(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const none))
    }
}

#[test]
fn without_io_uring_a_pool_of_threads_reads_and_says_so_once() {
    let verdict = assert_identical(&verify(tiny(), &[], forbid_io_uring));
    let notes = verdict["notes"].to_string();
    assert_eq!(notes.matches("pool of threads").count(), 1, "{notes}");
}

#[test]
fn io_uring_asked_for_and_forbidden_is_an_error() {
    let output = verify(tiny(), &["--reader", "uring"], forbid_io_uring);
    common::assert_refused(&output, &["io_uring"]);
}

#[test]
fn the_pool_of_threads_can_be_asked_for() {
    assert_identical(&verify(tiny(), &["--reader", "pread"], nothing));
}

#[test]
fn without_locked_memory_it_works_all_the_same() {
    assert_identical(&verify(tiny(), &[], forbid_locked_memory));
}

/// A file system that refuses O_DIRECT (before Linux 6.6) or has no disk behind it.
#[test]
fn a_model_on_tmpfs_works() {
    let Ok(shm) = tempfile::tempdir_in("/dev/shm") else {
        return eprintln!("not tested here: no /dev/shm");
    };
    let model = make("tiny-qwen3moe", 1, &shm.path().join("m.gguf"));
    let on_tmpfs = assert_identical(&verify(&model, &[], nothing));
    let on_disk = assert_identical(&verify(tiny(), &[], nothing));
    assert_eq!(on_tmpfs["sha256_budget"], on_disk["sha256_budget"]);
    assert!(folder().exists());
}
