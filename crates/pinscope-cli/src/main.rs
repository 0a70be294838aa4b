//! `pinscope`: runs Mixture-of-Experts models that are larger than memory.

mod args;
mod bench;
mod cgroup;
mod chat;
mod doctor;
mod engine;
mod generate;
mod interrupt;
mod launch;
mod pin;
mod pinning;
mod plan_cmd;
mod plot;
mod plot_cmd;
mod profile;
mod ram;
mod run;
mod sidecar;
mod signals;
mod simulate;
mod spin;
mod style;
mod text;
mod threads;
mod trace;
mod utf8;
mod verify;
mod worker;

use std::error::Error;
use std::io;
use std::process::ExitCode;

use clap::Parser;

use crate::args::{with_llama_spelling, Cli, Command};
use crate::generate::GenerateError;

fn main() -> ExitCode {
    spin::limit();
    // Before ggml, which reads headers too, prints anything.
    pinscope_host::init();
    let result = match Cli::parse_from(with_llama_spelling(std::env::args_os())).command {
        Command::Run(args) => run::main(&args).map(|stopped| match stopped {
            true => ExitCode::from(interrupt::EXIT_CODE),
            false => ExitCode::SUCCESS,
        }),
        Command::Plan(args) => plan_cmd::main(&args).map(|()| ExitCode::SUCCESS),
        Command::Profile(args) => profile::main(&args),
        Command::Pin(args) => pin::main(&args).map(|()| ExitCode::SUCCESS),
        Command::Trace(args) => trace::main(&args),
        Command::Simulate(args) => simulate::main(&args).map(|()| ExitCode::SUCCESS),
        Command::Doctor(args) => doctor::main(&args).map(|()| ExitCode::SUCCESS),
        Command::Plot(args) => plot_cmd::main(&args).map(|()| ExitCode::SUCCESS),
        Command::Verify(args) => return verify::main(&args),
        Command::Bench(args) => return bench::main(&args),
        Command::Worker => return worker::main(),
    };
    result.unwrap_or_else(|error| {
        if is_closed_output(error.as_ref()) {
            // `pinscope run ... | head` has what it wanted.
            return ExitCode::SUCCESS;
        }
        style::note(&format!("pinscope: {error}"));
        ExitCode::FAILURE
    })
}

fn is_closed_output(error: &(dyn Error + 'static)) -> bool {
    let io_error = match error.downcast_ref::<GenerateError>() {
        Some(GenerateError::Output(e)) => Some(e),
        _ => error.downcast_ref::<io::Error>(),
    };
    io_error.is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}
