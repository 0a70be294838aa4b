//! Text from tokens: a character may be spread over several of them.

/// Turns a stream of bytes into text as early as possible.
#[derive(Debug, Default)]
pub struct Utf8Stream {
    /// The beginning of a character.
    pending: Vec<u8>,
}

impl Utf8Stream {
    /// Adds bytes and returns the text that is complete now. Bytes that cannot
    /// be UTF-8 become U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut used = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                break;
            }
            let at_end = used + invalid.len() == self.pending.len();
            let may_become_valid =
                std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if at_end && may_become_valid {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            used += invalid.len();
        }
        self.pending.drain(..used);
        text
    }

    /// What is left at the end: nothing, or a character that was cut off.
    pub fn finish(&mut self) -> &'static str {
        if std::mem::take(&mut self.pending).is_empty() {
            ""
        } else {
            "\u{FFFD}"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_appears_when_its_last_byte_does() {
        let mut stream = Utf8Stream::default();
        let euro = "€".as_bytes();
        assert_eq!(stream.push(b"a"), "a");
        assert_eq!(stream.push(&euro[..1]), "");
        assert_eq!(stream.push(&euro[1..2]), "");
        assert_eq!(stream.push(&[euro[2], b'b']), "€b");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn bytes_that_are_not_text_are_marked_and_do_not_hold_the_rest_back() {
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(b"\xFFx"), "\u{FFFD}x");
        assert_eq!(stream.push(b"\xE2\x82"), "");
        assert_eq!(stream.push(b"z"), "\u{FFFD}z");
        stream.push(b"\xF0\x9F");
        assert_eq!(stream.finish(), "\u{FFFD}");
        assert_eq!(stream.finish(), "");
    }
}
