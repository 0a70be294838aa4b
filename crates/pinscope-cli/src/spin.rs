//! How long threads of arithmetic spin when they wait for each other.
//!
//! OpenMP's threads spin for milliseconds before they sleep. While one of them
//! waits for the disk, or another program has its core, that burns the time of
//! whoever could work. Two cores, 60 tokens of a small model, tokens a second
//! (`GOMP_SPINCOUNT=N pinscope run ..`, twice each):
//!
//! | rounds | alone | one busy program beside | two |
//! |---|---|---|---|
//! | 1000 | 30, 26 | 8.1, 10.5 | 13.4, 12.1 |
//! | 5000 | 37, 29 | 5.9, 5.4 | 10.3, 10.9 |
//! | 300000, libgomp's own | | 12.1, 10.4 | 1.6, 0.4 |
//!
//! On a large model, where threads meet less often, 1000 and 5000 are alike
//! alone (qwen3-30b-a3b: 106 and 104 ms of arithmetic a token, medians of three).

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Rounds of libgomp's waiting loop, some tens of nanoseconds each: what libgomp
/// itself takes when it knows that there are more threads than cores.
const SPINS: &str = "1000";

/// Starts this program anew with a limit on spinning, unless the user has
/// chosen one: libgomp reads it when it is loaded, before `main`. Where that
/// fails, things go on as they were.
pub fn limit() {
    let chosen = |name| std::env::var_os(name).is_some();
    if chosen("OMP_WAIT_POLICY") || chosen("GOMP_SPINCOUNT") {
        return;
    }
    let mut args = std::env::args_os();
    let mut again = Command::new("/proc/self/exe");
    if let Some(name) = args.next() {
        again.arg0(name);
    }
    let _failed = again.args(args).env("GOMP_SPINCOUNT", SPINS).exec();
}
