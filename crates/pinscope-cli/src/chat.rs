//! The interactive chat of `pinscope run`.

use std::io::{BufRead, IsTerminal, Write};

use pinscope_host::ChatMessage;

use crate::engine::Session;
use crate::generate::{Ended, GenerateError, Generator};
use crate::profile::Recorder;
use crate::run::report;
use crate::{interrupt, style};

/// Asks for lines and answers them until `/exit`, end of input, or two Ctrl-C.
///
/// # Errors
/// A model without a usable chat template, and whatever ends a decode for good.
pub fn main(
    session: &Session,
    generator: &mut Generator,
    limit: Option<usize>,
    recorder: Option<&Recorder>,
) -> Result<(), Box<dyn std::error::Error>> {
    // A template that is missing or unknown is better known before typing.
    let hello = ChatMessage { role: "user".into(), content: "Hello".into() };
    session.model.apply_chat(&[hello], true)?;
    let interactive = std::io::stdin().is_terminal();
    if interactive {
        style::note("Ctrl-C stops an answer; /clear begins anew, /exit leaves.");
    }
    let mut messages: Vec<ChatMessage> = Vec::new();
    while let Some(line) = ask(interactive)? {
        match line.trim() {
            "" => continue,
            "/exit" => break,
            "/clear" => {
                messages.clear();
                continue;
            }
            text => messages.push(ChatMessage { role: "user".into(), content: text.to_owned() }),
        }
        let prompt = session.model.apply_chat(&messages, true)?;
        let tokens = session.model.tokenize(&prompt, true, true)?;
        let mut out = std::io::stdout().lock();
        let answer = match generator.answer(&tokens, limit, &mut out) {
            Err(error @ GenerateError::PromptTooLong { .. }) => {
                messages.pop();
                style::note(&format!("{error}. Or begin anew with /clear."));
                continue;
            }
            other => other?,
        };
        writeln!(out)?;
        out.flush()?;
        drop(out);
        if answer.text.is_empty() && answer.ended == Ended::Stopped {
            // As if it had not been said.
            messages.pop();
            continue;
        }
        report(&answer, session);
        if let Some(recorder) = recorder {
            recorder.keep(session)?;
        }
        messages.push(ChatMessage { role: "assistant".into(), content: answer.text });
    }
    Ok(())
}

/// The next line, `None` at the end of input.
fn ask(interactive: bool) -> std::io::Result<Option<String>> {
    let _guard = interrupt::at_prompt();
    if interactive {
        let mut err = std::io::stderr().lock();
        write!(err, "\n> ")?;
        err.flush()?;
    }
    let mut line = Vec::new();
    let n = std::io::stdin().lock().read_until(b'\n', &mut line)?;
    Ok((n > 0).then(|| String::from_utf8_lossy(&line).into_owned()))
}
