//! `pinscope run`: one answer, or a chat.

use std::io::Write;

use pinscope_host::{ChatMessage, Model};

use crate::args::RunArgs;
use crate::chat;
use crate::engine::{Caching, Prepared, Session, TimelineError};
use crate::generate::{Answer, Ended, Generator};
use crate::profile::Recorder;
use crate::ram::Ram;
use crate::{interrupt, style};

/// Loads the model and answers or chats. True if Ctrl-C ended the one answer.
///
/// # Errors
/// Everything that keeps the answer from being complete.
pub fn main(args: &RunArgs) -> Result<bool, Box<dyn std::error::Error>> {
    interrupt::install()?;
    let ram = Ram::bytes(args.model.ram.as_ref())?;
    let mut context = args.model.context_options();
    let mut prepared = Prepared::new(&args.model.model, ram, &context)?;
    context.n_ctx = prepared.n_ctx;
    let recorder = Recorder::new(args, &prepared)?;
    if !recorder.as_ref().is_some_and(Recorder::is_first) {
        prepared.pin(&args.pinning)?;
    }

    let bar = style::bar("Loading", 1000);
    let caching = Caching {
        policy: args.model.policy,
        reader: args.model.reader,
        // Plain llama.cpp does not say what its router chooses.
        step_aside: recorder.is_none() && args.timeline.is_none(),
        prefetch: true,
    };
    let session = prepared.load(caching, &mut |done| bar.set_position((done * 1000.0) as u64));
    bar.finish_and_clear();
    let session = session?;
    session.notes().iter().for_each(|note| style::note(note));

    if let Some(path) = &args.timeline {
        session.record_timeline(path)?;
    }
    let mut generator = Generator::new(&session, context, &args.lora, &args.sampler_options())?;
    let Some(prompt) = &args.prompt else {
        chat::main(&session, &mut generator, args.predict, recorder.as_ref())?;
        finish_timeline(args, &session)?;
        return Ok(false);
    };
    let tokens =
        session.model.tokenize(&prompt_text(&session.model, prompt, args.raw)?, true, !args.raw)?;
    let mut out = std::io::stdout().lock();
    let answer = generator.answer(&tokens, args.predict, &mut out)?;
    writeln!(out)?;
    out.flush()?;
    drop(out);
    report(&answer, &session);
    finish_timeline(args, &session)?;
    if let Some(recorder) = &recorder {
        recorder.keep(&session)?;
    }
    Ok(answer.ended == Ended::Stopped)
}

fn finish_timeline(args: &RunArgs, session: &Session) -> Result<(), TimelineError> {
    if let Some(path) = &args.timeline {
        style::note(&session.finish_timeline(path)?);
    }
    Ok(())
}

/// The prompt in the model's chat template, if it has one.
fn prompt_text(
    model: &Model,
    prompt: &str,
    raw: bool,
) -> Result<String, Box<dyn std::error::Error>> {
    if raw || model.chat_template().is_none() {
        return Ok(prompt.to_owned());
    }
    let message = ChatMessage { role: "user".into(), content: prompt.to_owned() };
    Ok(model.apply_chat(&[message], true)?)
}

/// Says how an answer went.
pub fn report(answer: &Answer, session: &Session) {
    if answer.ended == Ended::ContextFull {
        style::note("The context is full, so the answer ends here; -c makes it larger.");
    }
    if let Some(news) = session.take_news() {
        style::note(&news);
    }
    style::note(&answer.summary(session.plan.ram_bytes));
}
