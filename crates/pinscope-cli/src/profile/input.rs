//! The text that is profiled: files, folders and conversations as pieces.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};

use pinscope_host::{ChatMessage, Model, Token};
use serde::Deserialize;

/// Tokens of a piece of text: a common length of prompts, and short enough
/// that many subjects come in.
const PIECE: usize = 512;
/// Text of one file that is looked at.
const MAX_FILE: u64 = 256 << 20;

/// Where the input is.
pub struct Source<'a> {
    pub text: &'a [PathBuf],
    pub chat: &'a [PathBuf],
    /// Most tokens of a piece, so that what is generated fits too.
    pub room: usize,
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
}

impl Source<'_> {
    /// All input in pieces, at most `limit` tokens (about), taken evenly.
    ///
    /// # Errors
    /// One sentence for the user: what cannot be read, or is no text.
    pub fn pieces(&self, model: &Model, limit: Option<usize>) -> Result<Vec<Vec<Token>>, String> {
        let mut pieces = Vec::new();
        for path in self.text {
            let files = files_of(path)?;
            let explicit = files.len() == 1 && files[0] == *path;
            for file in files {
                let text = match read(&file) {
                    Ok(text) => text,
                    // Folders may hold pictures and the like.
                    Err(_) if !explicit => continue,
                    Err(e) => return Err(e),
                };
                let tokens = model.tokenize(&text, true, false).map_err(|e| e.to_string())?;
                pieces.extend(tokens.chunks(PIECE.min(self.room)).map(<[Token]>::to_vec));
            }
        }
        for path in self.chat {
            self.conversations(model, path, &mut pieces)?;
        }
        if pieces.is_empty() {
            return Err("the input has no text: give text files, or folders with some".into());
        }
        Ok(thin(pieces, limit))
    }

    fn conversations(
        &self,
        model: &Model,
        path: &Path,
        pieces: &mut Vec<Vec<Token>>,
    ) -> Result<(), String> {
        let text = read(path)?;
        for (number, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
            let wrong = |why: String| {
                format!(
                    "{}, line {}: {why}. Each line must be a conversation: \
                     {{\"messages\": [{{\"role\": \"user\", \"content\": \"...\"}}]}}",
                    path.display(),
                    number + 1
                )
            };
            let chat: Conversation =
                serde_json::from_str(line).map_err(|e| wrong(e.to_string()))?;
            let mut messages: Vec<ChatMessage> = chat
                .messages
                .into_iter()
                .map(|m| ChatMessage { role: m.role, content: m.content })
                .collect();
            // The model gives the last answer itself.
            if messages.last().is_some_and(|m| m.role == "assistant") {
                messages.pop();
            }
            if messages.is_empty() {
                return Err(wrong("nobody asks anything".into()));
            }
            let prompt = model.apply_chat(&messages, true).map_err(|e| wrong(e.to_string()))?;
            let tokens = model.tokenize(&prompt, true, true).map_err(|e| e.to_string())?;
            // Of one that is too long the end, which the answer is about.
            pieces.push(tokens[tokens.len().saturating_sub(self.room)..].to_vec());
        }
        Ok(())
    }
}

/// The file itself, or all files in a folder and its folders, sorted by name.
fn files_of(path: &Path) -> Result<Vec<PathBuf>, String> {
    let cannot = |path: &Path, e| format!("cannot read {}: {e}", path.display());
    if !fs::metadata(path).map_err(|e| cannot(path, e))?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    let mut folders = VecDeque::from([path.to_owned()]);
    while let Some(folder) = folders.pop_front() {
        for entry in fs::read_dir(&folder).map_err(|e| cannot(&folder, e))? {
            let entry = entry.map_err(|e| cannot(&folder, e))?;
            // Links are not followed: they may lead round in a circle.
            match entry.file_type() {
                Ok(t) if t.is_dir() => folders.push_back(entry.path()),
                Ok(t) if t.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<String, String> {
    use std::io::Read;
    let cannot = |e| format!("cannot read {}: {e}", path.display());
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(cannot)?;
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(cannot)?;
    String::from_utf8(bytes).map_err(|_| format!("{} is not UTF-8 text", path.display()))
}

/// As many pieces as `limit` tokens allow, from everywhere.
fn thin(pieces: Vec<Vec<Token>>, limit: Option<usize>) -> Vec<Vec<Token>> {
    let all: usize = pieces.iter().map(Vec::len).sum();
    let Some(limit) = limit.filter(|&limit| limit < all) else { return pieces };
    let share = limit as f64 / all as f64;
    let mut due = 0.0;
    let mut kept = Vec::new();
    for piece in &pieces {
        let tokens = piece.len() as f64;
        due += tokens * share;
        if due >= tokens / 2.0 {
            due -= tokens;
            kept.push(piece.clone());
        }
    }
    if kept.is_empty() {
        kept.extend(pieces.into_iter().next().map(|mut p| {
            p.truncate(limit);
            p
        }));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_takes_pieces_from_everywhere() {
        let pieces: Vec<Vec<Token>> = (0..100).map(|i| vec![i; 10]).collect();
        let kept = thin(pieces.clone(), Some(200));
        assert_eq!(kept.len(), 20);
        assert!(kept.windows(2).all(|w| w[1][0] - w[0][0] == 5));
        assert_eq!(thin(pieces.clone(), None).len(), 100);
        assert_eq!(thin(pieces, Some(3))[0].len(), 3);
    }

    #[test]
    fn a_folder_is_all_its_files_and_a_missing_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        for name in ["b/2.txt", "a.txt"] {
            fs::write(dir.path().join(name), "text").unwrap();
        }
        std::os::unix::fs::symlink(dir.path(), dir.path().join("circle")).unwrap();
        let files = files_of(dir.path()).unwrap();
        assert_eq!(files, [dir.path().join("a.txt"), dir.path().join("b/2.txt")]);
        assert!(files_of(Path::new("/no/such")).unwrap_err().contains("/no/such"));
    }
}
