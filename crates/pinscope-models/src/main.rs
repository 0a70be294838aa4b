//! `pinscope-models`: makes and measures model files.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pinscope_models::gguf::TensorType;
use pinscope_models::routing::{self, Figures};
use pinscope_models::synth::{self, ExpertTypes, Shape};
use pinscope_models::upcycle::{self, Stage};
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
    /// Make a Mixture of Experts of a dense llama-architecture model
    Upcycle(UpcycleArgs),
    /// Measure how a Mixture-of-Experts model routes a text
    Routing(RoutingArgs),
}

#[derive(clap::Args)]
struct UpcycleArgs {
    /// The dense model, such as SmolLM2-135M-Instruct
    #[arg(long)]
    base: PathBuf,
    /// The file to write
    out: PathBuf,
    /// Text that the routers shall fit; a mixed one that is built in if absent
    #[arg(long)]
    text: Option<PathBuf>,
    /// Experts in a layer
    #[arg(long, default_value_t = 32)]
    experts: u32,
    /// Experts that a token uses
    #[arg(long, default_value_t = 4)]
    top_k: u32,
    /// Perturbation of the experts, in standard deviations of the weights
    #[arg(long, default_value_t = 0.05)]
    noise: f32,
    /// Sharpness of the routers
    #[arg(long, default_value_t = 12.0)]
    temp: f32,
    /// Type of the experts (a ggml type)
    #[arg(long = "type", default_value = "Q8_0")]
    ty: String,
    /// Read at most this many tokens of the text
    #[arg(long, default_value_t = 16_000)]
    tokens: usize,
    /// Seed of clusters and perturbations
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(clap::Args)]
struct RoutingArgs {
    /// The model (for a split one: its first part)
    #[arg(short, long)]
    model: PathBuf,
    /// The text; a mixed one that is built in if absent
    #[arg(long)]
    text: Option<PathBuf>,
    /// Measure at most this many tokens
    #[arg(long, default_value_t = 512)]
    tokens: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
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
    /// Another number of experts in a layer, of the same size
    #[arg(long)]
    experts: Option<u64>,
}

enum Unit {
    Bytes,
    Tokens,
    Layers,
}

/// A bar on a terminal, nothing elsewhere.
fn progress_bar(unit: Unit) -> impl FnMut(u64, u64) {
    let template = match unit {
        Unit::Bytes => "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
        Unit::Tokens => "{bar:40} {pos} of {len} tokens, {eta} left",
        Unit::Layers => "{bar:40} {pos} of {len} layers, {eta} left",
    };
    let style = indicatif::ProgressStyle::with_template(template).expect("a valid template");
    let bar = indicatif::ProgressBar::no_length().with_style(style);
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
    if let Some(experts) = args.experts {
        shape = shape.with_experts(experts)?;
    }
    let options = synth::Options {
        seed: args.seed,
        experts: match &args.ty {
            Some(name) => name.parse()?,
            None => ExpertTypes::Shape,
        },
        parts: args.parts,
    };
    for file in synth::write(&shape, &options, &args.out, &mut progress_bar(Unit::Bytes))? {
        println!("{}", file.display());
    }
    Ok(())
}

fn upcycle(args: UpcycleArgs) -> Result<(), Error> {
    let text = read_text(args.text.as_deref())?;
    let options = upcycle::Options {
        experts: args.experts,
        top_k: args.top_k,
        noise: args.noise,
        temperature: args.temp,
        ty: TensorType::parse(&args.ty)?,
        tokens: args.tokens,
        seed: args.seed,
    };
    let mut reading = progress_bar(Unit::Tokens);
    let mut clustering = progress_bar(Unit::Layers);
    let mut writing = progress_bar(Unit::Bytes);
    let mut progress = |stage, done, total| match stage {
        Stage::Reading => reading(done, total),
        Stage::Clustering => clustering(done, total),
        Stage::Writing => writing(done, total),
    };
    let file = upcycle::upcycle(&args.base, &text, &options, &args.out, &mut progress)?;
    println!("{}", file.display());
    Ok(())
}

fn routing(args: RoutingArgs) -> Result<(), Error> {
    let text = read_text(args.text.as_deref())?;
    let report =
        routing::measure(&args.model, &text, args.tokens, &mut progress_bar(Unit::Tokens))?;
    if args.json {
        println!("{}", serde_json::json!(report));
        return Ok(());
    }
    println!(
        "{}: {} layers of {} experts, {} a token; {} tokens",
        report.model.display(),
        report.layers,
        report.experts,
        report.top_k,
        report.tokens
    );
    let columns: Vec<&Figures> = report.thirds.iter().chain([&report.overall]).collect();
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(["", "first third", "middle", "last", "all layers"]);
    let mut row = |name: &str, get: &dyn Fn(&Figures) -> Option<f64>| {
        let cells = columns.iter().map(|f| get(f).map_or("n/a".into(), |v| format!("{v:.3}")));
        table.add_row(std::iter::once(name.to_string()).chain(cells));
    };
    row("previous-token overlap", &|f| Some(f.previous_token_overlap));
    row("share of the k most popular experts", &|f| Some(f.top_k_share));
    row("share of the top 10 %", &|f| Some(f.top_10_percent_share));
    row("share of the top 25 %", &|f| Some(f.top_25_percent_share));
    row("share of the top 50 %", &|f| Some(f.top_50_percent_share));
    row("next layer's router on this layer's input", &|f| f.next_layer_accuracy);
    row("experts active in 128 tokens", &|f| f.active_in_128_tokens);
    println!("{table}");
    Ok(())
}

fn read_text(path: Option<&Path>) -> Result<String, Error> {
    match path {
        None => Ok(pinscope_models::TEXT.to_string()),
        Some(path) => std::fs::read_to_string(path).map_err(|source| Error::Io {
            action: "read the text",
            path: path.to_path_buf(),
            source,
        }),
    }
}

fn main() -> ExitCode {
    // Keeps llama.cpp's log off the terminal.
    pinscope_host::init();
    let result = match Cli::parse().command {
        Command::Synth(args) => synth(args),
        Command::Upcycle(args) => upcycle(args),
        Command::Routing(args) => routing(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pinscope-models: {error}");
            ExitCode::FAILURE
        }
    }
}
