//! Prompt in, text out.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use pinscope::memory::{format_bytes, Footprint};
use pinscope::residency::Counters;
use pinscope_host::{Context, ContextOptions, HostError, Logits, Sampler, SamplerOptions, Token};

use crate::engine::Session;
use crate::utf8::Utf8Stream;
use crate::{interrupt, style};

/// Why there is no complete answer.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    #[error(
        "the prompt has {tokens} tokens and the context holds {n_ctx}, of which the answer \
         needs at least one; shorten it or give a larger context (-c)"
    )]
    PromptTooLong { tokens: usize, n_ctx: u32 },
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("{0}")]
    Decode(String),
    #[error(transparent)]
    Output(#[from] io::Error),
}

/// What ended an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The model.
    Itself,
    /// `-n`.
    Limit,
    /// No room for another token.
    ContextFull,
    /// Ctrl-C.
    Stopped,
}

/// An answer and how it went.
#[derive(Debug)]
pub struct Answer {
    pub text: String,
    pub ended: Ended,
    prompt: Phase,
    generation: Phase,
    /// Of the generation; `None` when PinScope stepped aside.
    counters: Option<Counters>,
    /// Memory that other programs needed more when it ended, bytes.
    given_back: u64,
}

#[derive(Debug, Default)]
struct Phase {
    tokens: usize,
    time: Duration,
}

impl Phase {
    fn rate(&self) -> f64 {
        match self.tokens {
            0 => 0.0,
            n => n as f64 / self.time.as_secs_f64().max(1e-9),
        }
    }
}

/// A conversation with a model.
pub struct Generator<'s> {
    session: &'s Session,
    context: Context<'s>,
    sampler: Sampler,
    stop: Arc<AtomicBool>,
    /// The tokens in the context, in order.
    held: Vec<Token>,
    /// Without a bar of its own.
    quiet: bool,
}

impl<'s> Generator<'s> {
    /// Allocates the context and applies the adapters `loras`.
    ///
    /// # Errors
    /// Those of [`Context::new`], [`Sampler::new`] and [`Model::load_lora`].
    ///
    /// [`Model::load_lora`]: pinscope_host::Model::load_lora
    pub fn new(
        session: &'s Session,
        options: ContextOptions,
        loras: &[PathBuf],
        sampling: &SamplerOptions,
    ) -> Result<Self, HostError> {
        let stop = interrupt::stop_flag();
        let options = ContextOptions { abort: Some(Arc::clone(&stop)), ..options };
        let mut context = Context::new(&session.model, options)?;
        let load = |path: &PathBuf| Ok((session.model.load_lora(path)?, 1.0));
        context.set_loras(&loras.iter().map(load).collect::<Result<Vec<_>, HostError>>()?)?;
        Ok(Self {
            session,
            context,
            sampler: Sampler::new(&session.model, sampling)?,
            stop,
            held: Vec::new(),
            quiet: false,
        })
    }

    /// Shows no progress of prompts.
    pub fn quiet(self) -> Self {
        Self { quiet: true, ..self }
    }

    /// Forgets what was said: the next prompt is computed whole.
    pub fn clear(&mut self) {
        self.context.clear();
        self.held.clear();
    }

    /// Answers `prompt`, a whole conversation, and writes the text to `out` as
    /// it comes. What the prompt shares with the last one is not computed again.
    ///
    /// # Errors
    /// A prompt that does not fit, a failed decode, a closed output.
    pub fn answer(
        &mut self,
        prompt: &[Token],
        limit: Option<usize>,
        out: &mut impl Write,
    ) -> Result<Answer, GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let n_ctx = self.context.n_ctx();
        if prompt.len() >= n_ctx as usize {
            return Err(GenerateError::PromptTooLong { tokens: prompt.len(), n_ctx });
        }
        let _guard = interrupt::answering();
        let mut answer = Answer {
            text: String::new(),
            ended: Ended::Itself,
            prompt: Phase::default(),
            generation: Phase::default(),
            counters: None,
            given_back: 0,
        };
        if !self.read_prompt(prompt, &mut answer.prompt)? {
            answer.ended = Ended::Stopped;
            return Ok(answer);
        }
        let before = self.session.stats();
        let started = Instant::now();
        answer.ended = self.write_answer(limit, &mut answer, out)?;
        answer.generation.time = started.elapsed();
        let after = self.session.stats();
        answer.given_back = after.map_or(0, |stats| stats.given_back);
        answer.counters =
            before.zip(after).map(|(before, after)| after.decode.since(&before.decode));
        Ok(answer)
    }

    /// False if it was stopped.
    fn read_prompt(&mut self, prompt: &[Token], phase: &mut Phase) -> Result<bool, GenerateError> {
        let shared = self.held.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        // The last token is computed again: its logits are needed.
        let mut keep = shared.min(prompt.len() - 1);
        if keep < self.held.len() && !self.context.truncate(keep as u32) {
            self.context.clear();
            keep = 0;
        }
        self.held.truncate(keep);
        let new = &prompt[keep..];
        new.iter().for_each(|&token| self.sampler.accept(token));
        let bar = match self.quiet {
            true => ProgressBar::hidden(),
            false => style::bar("Prompt", new.len() as u64),
        };
        let started = Instant::now();
        for piece in new.chunks(self.context.n_batch() as usize) {
            let last = self.held.len() + piece.len() == prompt.len();
            let logits = if last { Logits::Last } else { Logits::None };
            if !self.decode(piece, logits)? {
                bar.finish_and_clear();
                return Ok(false);
            }
            bar.inc(piece.len() as u64);
        }
        bar.finish_and_clear();
        *phase = Phase { tokens: new.len(), time: started.elapsed() };
        Ok(true)
    }

    fn write_answer(
        &mut self,
        limit: Option<usize>,
        answer: &mut Answer,
        out: &mut impl Write,
    ) -> Result<Ended, GenerateError> {
        let mut stream = Utf8Stream::default();
        let ended = loop {
            if limit.is_some_and(|limit| answer.generation.tokens >= limit) {
                break Ended::Limit;
            }
            let token = self.sampler.sample(&self.context);
            if self.session.model.is_eog(token) {
                break Ended::Itself;
            }
            let text = stream.push(&self.session.model.piece(token, false));
            out.write_all(text.as_bytes())?;
            out.flush()?;
            answer.text.push_str(&text);
            answer.generation.tokens += 1;
            if self.held.len() >= self.context.n_ctx() as usize {
                break Ended::ContextFull;
            }
            if !self.decode(&[token], Logits::Last)? {
                break Ended::Stopped;
            }
        };
        let rest = stream.finish();
        out.write_all(rest.as_bytes())?;
        answer.text.push_str(rest);
        Ok(ended)
    }

    /// Appends tokens to the context; false if it was stopped.
    fn decode(&mut self, tokens: &[Token], logits: Logits) -> Result<bool, GenerateError> {
        // Short decodes may end before llama.cpp looks at the flag.
        if self.stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match self.context.decode(tokens, self.held.len() as u32, logits) {
            Ok(()) => {
                self.held.extend_from_slice(tokens);
                Ok(true)
            }
            Err(HostError::Aborted) => Ok(false),
            Err(error) => Err(GenerateError::Decode(self.session.explain(error))),
        }
    }
}

impl Answer {
    /// One line: speeds, what the cache did, memory.
    pub fn summary(&self, ram: u64) -> String {
        let mut line = format!(
            "[prompt {} tokens, {:.1} tok/s; answer {} tokens, {:.2} tok/s",
            self.prompt.tokens,
            self.prompt.rate(),
            self.generation.tokens,
            self.generation.rate()
        );
        if let Some(counters) = self.counters {
            let per_token = counters.bytes_read as f64 / counters.tokens.max(1) as f64 / 1e6;
            let all = (counters.hits + counters.misses).max(1) as f64;
            let pinned = match counters.pinned_hits {
                0 => String::new(),
                n => format!(" ({:.1} % pinned)", 100.0 * n as f64 / all),
            };
            line += &format!(
                "; {:.1} % of experts found in RAM{pinned}, {per_token:.1} MB read a token",
                100.0 * counters.hit_rate()
            );
        }
        if self.given_back > 0 {
            let given = format_bytes(self.given_back);
            line += &format!("; {given} given back to other programs");
        }
        if let Ok(footprint) = Footprint::now() {
            let (peak, ram) = (format_bytes(footprint.peak), format_bytes(ram));
            line += &format!("; peak memory {peak} of {ram}");
        }
        line + "]"
    }
}
