//! The token stream that every contender works through.

use std::path::Path;

use pinscope_host::{Model, ModelOptions};

/// English on many subjects, so that routing changes as it does in real use;
/// about 2,000 tokens in common vocabularies.
const SAMPLE: &str = include_str!("sample.txt");

/// Tokens of the text in `file` (or of the built-in sample): exactly `count`,
/// from the start, repeated if the text is shorter.
///
/// # Errors
/// One sentence for the user: the file cannot be read, or the model's
/// vocabulary cannot be loaded.
pub fn tokens(model: &Path, file: Option<&Path>, count: usize) -> Result<Vec<i32>, String> {
    let text = match file {
        None => SAMPLE.to_string(),
        Some(path) => std::fs::read(path)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .map_err(|e| format!("cannot read the text {}: {e}", path.display()))?,
    };
    let options = ModelOptions { vocab_only: true, ..ModelOptions::default() };
    let model = Model::load(model, options).map_err(|e| e.to_string())?;
    let tokens = model.tokenize(&text, true, false).map_err(|e| e.to_string())?;
    if tokens.is_empty() {
        return Err("the text gives no tokens; give a longer one with --text".into());
    }
    Ok(tokens.into_iter().cycle().take(count).collect())
}
