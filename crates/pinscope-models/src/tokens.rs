//! A small byte-pair vocabulary, trained on the text that ships with this crate.
//!
//! Synthetic models need realistic token streams: with single bytes as tokens, English
//! would only ever use some forty of them and hence few experts.

use std::collections::{BTreeMap, HashMap, HashSet};

/// Mixed English prose, dialogue, lists and code.
pub const TEXT: &str = include_str!("../text/mixed.txt");

/// More merges than this would only memorise the text.
const MOST_MERGES: usize = 3000;

/// ChatML, which llama.cpp knows by its markers.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// A vocabulary as GGUF wants it.
pub struct Vocabulary {
    /// Token texts in GPT-2's printable alphabet.
    pub tokens: Vec<String>,
    /// GGUF token types: 1 normal, 3 control.
    pub types: Vec<i32>,
    /// Merges by rank.
    pub merges: Vec<String>,
    /// Id of the end-of-text token.
    pub end_of_text: u32,
    /// Id of the end-of-turn token.
    pub end_of_turn: u32,
}

impl Vocabulary {
    /// A vocabulary of exactly `size` tokens: bytes, special tokens, merges, fillers.
    ///
    /// # Panics
    /// If `size` does not even hold the bytes and the special tokens.
    pub fn new(size: usize) -> Self {
        let room = size.checked_sub(256 + SPECIAL.len()).expect("room for bytes");
        let merges = train(TEXT, room.min(MOST_MERGES));
        let mut tokens: Vec<String> = byte_alphabet().iter().map(|c| c.to_string()).collect();
        let mut types = vec![1; size];
        types[256..256 + SPECIAL.len()].fill(3);
        tokens.extend(SPECIAL.map(String::from));
        // Two merges may spell the same token.
        let mut known = HashSet::new();
        tokens.extend(
            merges
                .iter()
                .map(|(a, b)| format!("{a}{b}"))
                .filter(|token| known.insert(token.clone())),
        );
        tokens.extend((tokens.len()..size).map(|i| format!("w{i}")));
        Self {
            tokens,
            types,
            merges: merges.iter().map(|(a, b)| format!("{a} {b}")).collect(),
            end_of_text: 256,
            end_of_turn: 258,
        }
    }
}

/// GPT-2's printable stand-in for each byte.
fn byte_alphabet() -> Vec<char> {
    let printable = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let mut stand_ins = 256..;
    (0..256)
        .map(|b| {
            let code = if printable(b) { Some(b) } else { stand_ins.next() };
            code.and_then(char::from_u32).expect("a valid character")
        })
        .collect()
}

/// The first `count` merges of byte-pair encoding (Sennrich et al. 2016) over the words
/// of `text`, each with the space before it.
fn train(text: &str, count: usize) -> Vec<(String, String)> {
    let mut frequency: BTreeMap<&str, u32> = BTreeMap::new();
    for word in words(text) {
        *frequency.entry(word).or_default() += 1;
    }
    let mut symbols: Vec<String> = Vec::new();
    let mut ids: HashMap<String, u32> = HashMap::new();
    let mut id_of = |symbol: String, symbols: &mut Vec<String>| {
        *ids.entry(symbol.clone()).or_insert_with(|| {
            symbols.push(symbol);
            symbols.len() as u32 - 1
        })
    };
    let mut spelled: Vec<(Vec<u32>, u32)> = frequency
        .iter()
        .map(|(word, n)| {
            let letters = word.chars().map(|c| if c == ' ' { 'Ġ' } else { c });
            let ids = letters.map(|c| id_of(c.to_string(), &mut symbols));
            (ids.collect(), *n)
        })
        .collect();
    let mut merges = Vec::new();
    while merges.len() < count {
        let mut pairs: HashMap<(u32, u32), u32> = HashMap::new();
        for (word, n) in &spelled {
            for pair in word.windows(2) {
                *pairs.entry((pair[0], pair[1])).or_default() += n;
            }
        }
        // The lowest pair wins a tie, so that the result does not depend on hashing.
        let best = pairs.iter().max_by_key(|(pair, n)| (**n, std::cmp::Reverse(**pair)));
        let Some((&(a, b), _)) = best else { break };
        let parts = (symbols[a as usize].clone(), symbols[b as usize].clone());
        let merged = id_of(format!("{}{}", parts.0, parts.1), &mut symbols);
        for (word, _) in &mut spelled {
            let mut read = 0;
            let mut write = 0;
            while read < word.len() {
                let hit = word[read] == a && word.get(read + 1) == Some(&b);
                word[write] = if hit { merged } else { word[read] };
                read += 1 + usize::from(hit);
                write += 1;
            }
            word.truncate(write);
        }
        merges.push(parts);
    }
    merges
}

/// Runs of ASCII letters with at most one space before them, as GPT-2 splits text.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let bytes = text.as_bytes();
    let mut at = 0;
    std::iter::from_fn(move || {
        while at < bytes.len() && !bytes[at].is_ascii_alphabetic() {
            at += 1;
        }
        let start = if at > 0 && bytes[at - 1] == b' ' { at - 1 } else { at };
        let letters = bytes[at..].iter().take_while(|b| b.is_ascii_alphabetic());
        at += letters.count();
        (start < at).then(|| &text[start..at])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_follow_frequency() {
        // a+b occurs three times, and then the space before it twice.
        let merges = train("ab ab ab bc", 2);
        let shown: Vec<_> = merges.iter().map(|(a, b)| format!("{a}+{b}")).collect();
        assert_eq!(shown, ["a+b", "Ġ+ab"].map(String::from));
    }

    #[test]
    fn words_keep_one_space_and_skip_the_rest() {
        let found: Vec<_> = words("It's  2 big,  dogs").collect();
        assert_eq!(found, ["It", "s", " big", " dogs"]);
    }

    #[test]
    fn vocabulary_has_the_asked_size_and_no_token_twice() {
        let vocabulary = Vocabulary::new(4000);
        assert_eq!(vocabulary.tokens.len(), 4000);
        assert_eq!(vocabulary.types.len(), 4000);
        let unique: std::collections::HashSet<_> = vocabulary.tokens.iter().collect();
        assert_eq!(unique.len(), 4000);
        assert_eq!(vocabulary.tokens[vocabulary.end_of_turn as usize], "<|im_end|>");
        assert_eq!(vocabulary.tokens[b' ' as usize], "Ġ");
    }
}
