//! What reading costs: CPU time a gigabyte and bytes a second, for each
//! reader, chunk and number of reads at once.
//!
//! `cargo run --release -p pinscope --example io_cost -- FILE [MIB]`

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use pinscope::arena::Arena;
use pinscope::map::ModelFile;
use pinscope::reader::{
    open_reader, tune, ModelFiles, ReadClass, ReadRequest, ReaderKind, ReaderOptions, ALIGN,
};

/// The arena: the first half is registered with io_uring, the second is not.
const ARENA: usize = 256 << 20;
/// Bytes of a request: a part of an expert.
const PART: usize = 1 << 20;
/// Requests that are outstanding, at most.
const REQUESTS: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let path = PathBuf::from(args.next().ok_or("give a large file")?);
    let total = args.next().map_or(Ok(1024), |n| n.parse::<usize>())? << 20;
    let len = std::fs::metadata(&path)?.len();
    if len < 2 * PART as u64 {
        return Err("the file is too small to measure anything".into());
    }
    let files = Arc::new(ModelFiles::open(&[ModelFile { path, len, header_len: 0 }])?);
    let arena = Arc::new(Arena::new(ARENA)?);
    for at in (ARENA / 2..ARENA).step_by(64 << 20) {
        // What has a hole is not registered.
        arena.release(at..at + ALIGN)?;
    }
    for kind in [ReaderKind::Uring, ReaderKind::Pread] {
        let started = Instant::now();
        let tuned = tune(&files, kind, PART)?;
        println!("tuned in {:.2} s: {tuned:?}", started.elapsed().as_secs_f64());
    }
    println!("reader               chunk KiB  depth   GB/s  CPU ms a GB");
    for (name, kind, base) in [
        ("io_uring registered", ReaderKind::Uring, 0),
        ("io_uring", ReaderKind::Uring, ARENA / 2),
        ("pread", ReaderKind::Pread, 0),
    ] {
        for (chunk, depth) in
            [(1 << 20, 16), (1 << 20, 4), (512 << 10, 8), (256 << 10, 16), (256 << 10, 4)]
        {
            let options =
                ReaderOptions { chunk, depth, threads: depth.min(4), ..Default::default() };
            let (mut reader, _) = open_reader(files.clone(), arena.clone(), kind, options)?;
            let mut done = Vec::new();
            let mut at = 0u64;
            let mut read = |total: usize| -> Result<(), Box<dyn Error>> {
                let (mut sent, mut back) = (0, 0);
                while back < total / PART {
                    while sent < total / PART && sent - back < REQUESTS {
                        // Steps of the golden ratio go all over the file.
                        at = at.wrapping_add(0x9E37_79B9_7F4A_7C15);
                        let place = (u128::from(at) * u128::from(len - PART as u64)) >> 64;
                        reader.submit(ReadRequest {
                            tag: 0,
                            file: 0,
                            offset: place as u64 / ALIGN as u64 * ALIGN as u64,
                            len: PART,
                            dest: base + sent % (2 * REQUESTS) * PART,
                            class: ReadClass::Demand,
                        })?;
                        sent += 1;
                    }
                    reader.kick();
                    reader.reap(&mut done, true)?;
                    back += done.len();
                    done.drain(..).try_for_each(|d| d.result)?;
                }
                Ok(())
            };
            read(128 << 20)?; // takes the memory
            let (start, cpu) = (Instant::now(), cpu_seconds());
            read(total)?;
            let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
            let gb = total as f64 / 1e9;
            println!(
                "{name:20} {:9}  {depth:5}  {:5.2}  {:11.1}",
                chunk >> 10,
                gb / wall,
                1e3 * cpu / gb
            );
        }
    }
    Ok(())
}

/// User and system time of this process.
fn cpu_seconds() -> f64 {
    // SAFETY: a plain struct of integers; the call writes one.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
