//! A llama.cpp program that knows nothing of PinScope, and runs of it.
//!
//! ggml's list of devices belongs to a process, so every scenario is a process
//! of its own: the test binary runs itself, with the test `program` as main.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use pinscope_host::{Context, ContextOptions, HostError, Logits, Model, ModelOptions, Token};
use sha2::{Digest, Sha256};

/// What the program is told, by environment.
const MODELS: &str = "PROGRAM_MODELS";
const OPTIONS: &str = "PROGRAM_OPTIONS";

/// The library under test, which cargo has put beside the test binary.
pub fn library() -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name("libggml_pinscope.so");
    assert!(path.exists(), "{}", path.display());
    path
}

/// A run of the program.
pub struct Program {
    command: Command,
}

/// What it printed.
#[derive(Debug)]
pub struct Output {
    /// A line for each model: a hash of its logits, or why there is none.
    pub results: Vec<String>,
    /// Pages of each model's file that were in the page cache after its load.
    pub cached: Vec<usize>,
    /// Bytes `start..end` of the model's file that were locked at the end.
    pub locked: Vec<(u64, u64)>,
    /// Standard error.
    pub log: String,
}

impl Program {
    /// The program with these models, one after the other.
    pub fn new(models: &[&Path]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "program", "--ignored", "--nocapture"]);
        let models: Vec<OsString> = models.iter().map(|m| m.as_os_str().to_owned()).collect();
        command.env(MODELS, models.join(&OsString::from(":")));
        command.env_remove("LD_PRELOAD").env("OMP_WAIT_POLICY", "passive");
        Self { command }
    }

    /// With `GGML_BACKEND_PATH` and this `PINSCOPE_RAM`.
    pub fn plugin(mut self, ram: &str) -> Self {
        self.command.env("GGML_BACKEND_PATH", library()).env("PINSCOPE_RAM", ram);
        self
    }

    /// With an environment variable.
    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// With `together` (all models in memory at once), `no-mmap`, or `locked`
    /// (tell what is locked).
    pub fn option(self, option: &str) -> Self {
        self.env(OPTIONS, option)
    }

    pub fn run(mut self) -> Output {
        let out = self.command.output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let log = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success(), "{text}\n{log}");
        let lines = |tag: &str| {
            let found = text.lines().filter_map(|l| l.split_once(tag)).map(|(_, v)| v.to_owned());
            found.collect::<Vec<_>>()
        };
        let cached = lines("CACHED ").iter().map(|n| n.parse().unwrap()).collect();
        let hex = |n: &str| u64::from_str_radix(n, 16).unwrap();
        let locked = lines("LOCKED ");
        let locked = locked.iter().map(|l| l.split_once(' ').unwrap());
        let locked = locked.map(|(a, b)| (hex(a), hex(b))).collect();
        Output { results: lines("RESULT "), cached, locked, log }
    }
}

/// The program itself.
pub fn program() {
    // SAFETY: loads what GGML_BACKEND_PATH names, as llama.cpp's programs do.
    unsafe { llama_cpp_sys_2::ggml_backend_load_all() };
    let models = std::env::var(MODELS).unwrap();
    let options = std::env::var(OPTIONS).unwrap_or_default();
    let mut kept = Vec::new();
    for path in models.split(':') {
        let path = Path::new(path);
        let loaded = Model::load(
            path,
            ModelOptions {
                read_ahead: true,
                use_mmap: !options.contains("no-mmap"),
                ..ModelOptions::default()
            },
        );
        println!("\nCACHED {}", cached_pages(path));
        match loaded.and_then(|model| Ok((logits_hash(&model)?, model))) {
            Ok((hash, model)) => {
                println!("RESULT {hash}");
                if options.contains("locked") {
                    std::thread::sleep(std::time::Duration::from_millis(500));
                    print_locked(path);
                }
                kept.extend(Some(model).filter(|_| options.contains("together")));
            }
            Err(e) => println!("RESULT failed: {e}"),
        }
    }
}

/// Prints which parts of the file are locked, once anything is: the library
/// does that on a thread of its own.
fn print_locked(path: &Path) {
    for _ in 0..500 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut range = None;
        let mut found = Vec::new();
        for line in smaps.lines() {
            let fields: Vec<&str> = line.split_whitespace().collect();
            if let Some((start, end)) = fields[0].split_once('-') {
                let hex = |n| u64::from_str_radix(n, 16).unwrap();
                let (len, offset) = (hex(end) - hex(start), hex(fields[2]));
                range = line.ends_with(path.to_str().unwrap()).then_some((offset, offset + len));
            } else if fields[0] == "VmFlags:" && fields.contains(&"lo") {
                found.extend(range);
            }
        }
        if !found.is_empty() {
            found.iter().for_each(|(a, b)| println!("LOCKED {a:x} {b:x}"));
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// A prompt in uneven batches, then token by token; all logits count.
fn logits_hash(model: &Model) -> Result<String, HostError> {
    let options = ContextOptions { n_ctx: 512, n_batch: 128, n_ubatch: 64, ..Default::default() };
    let mut ctx = Context::new(model, options)?;
    let vocab = model.n_vocab();
    let tokens: Vec<Token> = (0..160).map(|i| (i * i * 31 % 251 % vocab) as Token).collect();
    let mut sha = Sha256::new();
    let mut pos = 0;
    for size in [1, 7, 50, 70].into_iter().chain(std::iter::repeat_n(1, 32)) {
        ctx.decode(&tokens[pos..pos + size], pos as u32, Logits::All)?;
        for i in 0..size {
            ctx.logits(i).iter().for_each(|l| sha.update(l.to_le_bytes()));
        }
        pos += size;
    }
    Ok(sha.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// Pages of a file that are in the page cache.
fn cached_pages(path: &Path) -> usize {
    let Ok(file) = std::fs::File::open(path) else { return 0 };
    let len = file.metadata().unwrap().len() as usize;
    let mut pages = vec![0u8; len.div_ceil(4096)];
    // SAFETY: a mapping of this function's own that is not touched; one byte
    // of answer for each page.
    unsafe {
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let at = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, fd, 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::mincore(at, len, pages.as_mut_ptr()), 0);
        libc::munmap(at, len);
    }
    pages.iter().filter(|&&p| p & 1 == 1).count()
}
