//! What is left for experts of the memory that the whole process may use.
//!
//! The program does as it likes with its context and buffers, and has made
//! them when the first graph is computed. What it has mapped then is what it
//! will use, even where it has not touched it yet.

use pinscope::map::ExpertMap;
use pinscope::memory::format_bytes;
use pinscope::plan::{Fixed, Plan};
use pinscope_ggml::scratch_bytes;

/// Divides `ram` bytes: the process uses `used`, and computes batches of at
/// most `batch` tokens.
///
/// # Errors
/// What the smallest `PINSCOPE_RAM` is that works.
pub fn plan(map: &ExpertMap, ram: u64, used: u64, batch: usize) -> Result<Plan, String> {
    let fixed = Fixed {
        compute: scratch_bytes(map, batch),
        // Dense weights are in it already, the plan adds them.
        process: used.saturating_sub(map.dense_bytes()),
        ..Fixed::default()
    };
    let plan = Plan::new(map, fixed, ram);
    if plan.check().is_ok() {
        return Ok(plan);
    }
    Err(format!(
        "PINSCOPE_RAM of {} is too little: the program uses {} without any expert. The smallest \
         value that works is {}M; a shorter context (-c) or smaller batches (-ub) lower it",
        format_bytes(ram),
        format_bytes(used),
        plan.smallest_ram_bytes.div_ceil(1 << 20)
    ))
}

/// What this process uses or will use of what it has mapped, bytes.
///
/// # Errors
/// `/proc/self/smaps` cannot be read.
pub fn used_bytes() -> std::io::Result<u64> {
    Ok(sum(&std::fs::read_to_string("/proc/self/smaps")?))
}

/// Stacks of threads are large and hardly used; the C library puts a guard
/// before each. Larger mappings than this are none.
const MAX_STACK: u64 = 64 << 20;
const MAX_GUARD: u64 = 64 << 10;

/// One mapping of `smaps`.
#[derive(Default)]
struct Mapping<'a> {
    range: (u64, u64),
    perms: &'a str,
    name: &'a str,
    anonymous: bool,
    rss: u64,
}

fn sum(smaps: &str) -> u64 {
    let mut total = 0;
    let mut last = Mapping::default();
    let mut current = Mapping::default();
    for line in smaps.lines() {
        if let Some(mapping) = header(line) {
            total += counted(&current, &last);
            last = std::mem::replace(&mut current, mapping);
        } else if let Some(rss) = line.strip_prefix("Rss:") {
            let kib = rss.trim().trim_end_matches("kB").trim().parse::<u64>();
            current.rss = kib.unwrap_or(0) * 1024;
        }
    }
    total + counted(&current, &last)
}

/// The first line of a mapping: `start-end perms offset device inode name`.
fn header(line: &str) -> Option<Mapping<'_>> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let range = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let perms = fields.next()?;
    let inode = fields.nth(2)?;
    let name = fields.next().unwrap_or("").trim();
    Some(Mapping { range, perms, name, anonymous: inode == "0", rss: 0 })
}

/// What of a mapping counts, given the one before it.
fn counted(m: &Mapping, before: &Mapping) -> u64 {
    let size = m.range.1 - m.range.0;
    let own = m.anonymous && m.perms.starts_with("rw") && m.perms.ends_with('p');
    let guarded = before.perms == "---p"
        && before.range.1 == m.range.0
        && before.range.1 - before.range.0 <= MAX_GUARD;
    let stack = m.name == "[stack]" || (guarded && size <= MAX_STACK);
    if m.name.starts_with("/memfd:pinscope-sink") {
        0 // the same memory over and over
    } else if own && !stack {
        size
    } else {
        m.rss
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_counts_whole_and_stacks_and_files_as_far_as_they_are_used() {
        let smaps = "\
1000-3000 r-xp 00000000 08:01 11 /usr/bin/my program
Size:                  8 kB
Rss:                   4 kB
Pss:                   1 kB
10000000-14000000 rw-p 00000000 00:00 0 
Size:              65536 kB
Rss:                  16 kB
20000000-20001000 ---p 00000000 00:00 0 
Size:                  4 kB
Rss:                   0 kB
20001000-20801000 rw-p 00000000 00:00 0 
Size:               8192 kB
Rss:                  32 kB
30000000-70000000 ---p 00000000 00:00 0 
Rss:                   0 kB
80000000-80200000 rw-s 00000000 00:01 77 /memfd:pinscope-sink (deleted)
Rss:                2048 kB
7ffc0000-7ffe0000 rw-p 00000000 00:00 0                          [stack]
Rss:                  64 kB
";
        assert_eq!(sum(smaps), (4 + 65536 + 32 + 64) << 10);
    }

    #[test]
    fn memory_that_was_allocated_and_not_touched_is_seen() {
        let before = used_bytes().unwrap();
        let block = std::hint::black_box(Vec::<u8>::with_capacity(200 << 20));
        // Tests beside this one may have given a little back.
        assert!(used_bytes().unwrap() >= before + (190 << 20));
        drop(block);
    }
}
