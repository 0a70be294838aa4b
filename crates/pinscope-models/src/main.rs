//! `pinscope-models`: makes and measures model files.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pinscope_models::synth::{self, ExpertTypes, Shape};
use pinscope_models::Error;

#[derive(Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a model of a published shape with random weights and realistic routing
    Synth(SynthArgs),
}

#[derive(clap::Args)]
struct SynthArgs {
    /// The shape
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(Shape::names()))]
    shape: String,
    /// The file to write
    out: PathBuf,
    /// Seed of the random weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Type of the experts (a ggml type such as Q4_K, or mixed); the shape's own if absent
    #[arg(long = "type")]
    ty: Option<String>,
    /// Number of files to split the model into
    #[arg(long, default_value_t = 1)]
    parts: u32,
    /// Keep only this many layers
    #[arg(long)]
    layers: Option<u32>,
}

fn progress_bar() -> impl FnMut(u64, u64) {
    let bar = indicatif::ProgressBar::no_length().with_style(
        indicatif::ProgressStyle::with_template(
            "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        )
        .expect("a valid template"),
    );
    move |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if done == total {
            bar.finish_and_clear();
        }
    }
}

fn synth(args: SynthArgs) -> Result<(), Error> {
    let mut shape = Shape::named(&args.shape)?;
    if let Some(layers) = args.layers {
        shape = shape.cut_to(layers)?;
    }
    let options = synth::Options {
        seed: args.seed,
        experts: match &args.ty {
            Some(name) => name.parse()?,
            None => ExpertTypes::Shape,
        },
        parts: args.parts,
    };
    for file in synth::write(&shape, &options, &args.out, &mut progress_bar())? {
        println!("{}", file.display());
    }
    Ok(())
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Synth(args) => synth(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pinscope-models: {error}");
            ExitCode::FAILURE
        }
    }
}
