//! `pinscope pin` beside a measured run: HotPin's technique for plain llama.cpp.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use crate::cgroup::MemoryGroup;
use crate::engine::Prepared;
use crate::launch::Job;
use crate::worker::context_options;

/// Of the limit, what stays for experts that are not pinned: llama.cpp reads
/// them through page cache, which must not be so little that every page is gone
/// before its neighbour is used.
const COLD_SHARE: f64 = 0.10;

/// A pin daemon; it ends when this is dropped.
pub struct Sidecar(Child);

impl Sidecar {
    /// Pins what `limit` bytes leave beside the run's own needs, by the job's
    /// profile, and returns when all is locked.
    ///
    /// # Errors
    /// One sentence for the user.
    pub fn start(job: &Job, group: Option<&MemoryGroup>, limit: u64) -> Result<Self, String> {
        let profile = job.setup.pinning.profile.as_ref().ok_or("pinning needs a profile")?;
        let plan = Prepared::new(&job.model, limit, &context_options(job))
            .map_err(|e| e.to_string())?
            .plan;
        let own = plan.kv_bytes + plan.compute_bytes + plan.output_bytes + plan.overhead_bytes;
        let cold = (limit as f64 * COLD_SHARE) as u64;
        let ram = limit.saturating_sub(own + cold) >> 20;

        let mut command = Command::new("/proc/self/exe");
        command.arg0("pinscope").arg("pin").arg("-m").arg(&job.model).arg("--profile").arg(profile);
        command.args(["--json", "--ram", &format!("{ram}M")]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = match group {
            Some(group) => group.spawn(&mut command),
            None => command.spawn(),
        };
        let mut sidecar = Self(child.map_err(|e| format!("cannot start `pinscope pin`: {e}"))?);
        let mut ready = String::new();
        if let Some(out) = sidecar.0.stdout.as_mut() {
            let _ = BufReader::new(out).read_line(&mut ready);
        }
        if ready.starts_with('{') {
            return Ok(sidecar);
        }
        let mut why = String::new();
        if let Some(mut err) = sidecar.0.stderr.take() {
            let _ = err.read_to_string(&mut why);
        }
        Err(format!("`pinscope pin` did not get ready: {}", why.trim()))
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.0.id()) {
            // SAFETY: our own child, which was not waited for.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        let _ = self.0.wait();
    }
}
