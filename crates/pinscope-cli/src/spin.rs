//! How long threads of arithmetic spin when they wait for each other.
//!
//! OpenMP's threads spin for milliseconds before they sleep. While one of them
//! waits for the disk, or another program has its core, that burns the time of
//! whoever could work: with a second program running, tokens came 2 to 10
//! times slower. Spinning for some tens of microseconds covers what threads
//! wait for each other and costs nothing on a quiet machine.

use std::os::unix::process::CommandExt;
use std::process::Command;

/// Rounds of libgomp's waiting loop, some tens of nanoseconds each.
const SPINS: &str = "5000";

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
