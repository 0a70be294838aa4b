//! How much memory this process may lock.

use std::fs;

/// For the user, when the limit is in the way.
pub const HOW_TO_RAISE: &str = "raise it with `ulimit -l unlimited` (as root, or up to the hard \
     limit), a line `USER - memlock unlimited` in /etc/security/limits.conf (and log in again), \
     LimitMEMLOCK=infinity in a systemd unit, or the capability CAP_IPC_LOCK \
     (`sudo setcap cap_ipc_lock+ep` on the program)";

/// Number of `CAP_IPC_LOCK`, which lifts the limit.
const CAP_IPC_LOCK: u32 = 14;

/// Bytes that may still be locked, after the soft limit was raised to the hard
/// one; `None`: as many as there are.
pub fn lockable_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uid_map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if may_lock_anything(&status, &uid_map) {
        return None;
    }
    let limit = raise_soft_limit();
    if limit == libc::RLIM_INFINITY {
        return None;
    }
    let locked = field(&status, "VmLck:").and_then(|v| v.parse::<u64>().ok()).unwrap_or(0);
    Some(limit.saturating_sub(locked * 1024))
}

/// Whether the capability is there and counts: the kernel wants that of the
/// first user namespace, which a rootless container's root has not.
fn may_lock_anything(status: &str, uid_map: &str) -> bool {
    let effective = field(status, "CapEff:").and_then(|v| u64::from_str_radix(v, 16).ok());
    let first_namespace = uid_map.split_whitespace().eq(["0", "0", "4294967295"]);
    first_namespace && effective.is_some_and(|caps| caps >> CAP_IPC_LOCK & 1 == 1)
}

/// The first word behind `name`.
fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|l| l.strip_prefix(name))?.split_whitespace().next()
}

/// Everybody may do that. Returns the soft limit as it is then.
fn raise_soft_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads and writes one rlimit of our own.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) != 0 {
            return 0;
        }
        let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
        if libc::setrlimit(libc::RLIMIT_MEMLOCK, &raised) == 0 {
            return raised.rlim_cur;
        }
    }
    limit.rlim_cur
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_capability_of_the_first_user_namespace_lifts_the_limit() {
        let first = "         0          0 4294967295\n";
        let with = "Name:\tx\nCapEff:\t0000000000004000\n";
        assert!(may_lock_anything(with, first));
        assert!(!may_lock_anything(with, "0 100000 65536\n"));
        assert!(!may_lock_anything("CapEff:\t0000000000003fff\n", first));
        assert!(!may_lock_anything("", ""));
    }
}
