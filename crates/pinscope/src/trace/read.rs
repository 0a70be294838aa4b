//! Reading traces.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use super::codec::{self, Next};
use super::{big_moe_on_edge, Trace, TraceError};

impl Trace {
    /// Reads a trace of PinScope's, or one in the format of BigMoeOnEdge. A
    /// recording that was killed is there up to its last whole pass.
    ///
    /// # Errors
    /// A file that cannot be read, is no trace, or is damaged.
    pub fn load(path: &Path) -> Result<Self, TraceError> {
        let read = |source| TraceError::Read { path: path.to_owned(), source };
        let mut file = BufReader::new(File::open(path).map_err(read)?);
        let mut start = Vec::new();
        let magic = codec::MAGIC.len();
        file.by_ref().take(magic as u64).read_to_end(&mut start).map_err(read)?;
        if start == codec::MAGIC {
            return Self::parse(&mut file, path);
        }
        if big_moe_on_edge::is_start(&start) {
            return big_moe_on_edge::parse(start.as_slice().chain(file), path);
        }
        let cut = codec::MAGIC.starts_with(&start) && !start.is_empty();
        Err(match cut {
            true => TraceError::NoHeader { path: path.to_owned() },
            false => {
                TraceError::NotATrace { path: path.to_owned(), why: "it begins otherwise".into() }
            }
        })
    }

    /// What follows the magic; `path` is for errors only.
    pub(super) fn parse(from: &mut impl Read, path: &Path) -> Result<Self, TraceError> {
        let read = |source: io::Error| match source.kind() {
            io::ErrorKind::UnexpectedEof => TraceError::NoHeader { path: path.to_owned() },
            _ => TraceError::Read { path: path.to_owned(), source },
        };
        let mut word = [0; 4];
        from.read_exact(&mut word).map_err(read)?;
        let version = u32::from_le_bytes(word);
        if version != codec::VERSION {
            return Err(TraceError::Version { path: path.to_owned(), found: version });
        }
        from.read_exact(&mut word).map_err(read)?;
        let length = u32::from_le_bytes(word);
        let wrong = |why: &str| TraceError::NotATrace { path: path.to_owned(), why: why.into() };
        if length > codec::LONGEST {
            return Err(wrong("its header is too long"));
        }
        let mut body = Vec::new();
        from.by_ref().take(u64::from(length)).read_to_end(&mut body).map_err(read)?;
        if body.len() < length as usize {
            return Err(TraceError::NoHeader { path: path.to_owned() });
        }
        let model = codec::parse_header(&body).ok_or_else(|| wrong("its header has no model"))?;
        let mut trace = Trace { model, passes: Vec::new(), cut: false, caveat: None };
        loop {
            let damaged = |why, pass| TraceError::Damaged { path: path.to_owned(), pass, why };
            match codec::next_pass(from, &mut body).map_err(read)? {
                Next::Pass => {
                    let pass = codec::parse_pass(&body, &trace.model);
                    trace.passes.push(pass.map_err(|why| damaged(why, trace.passes.len()))?);
                }
                Next::End => return Ok(trace),
                Next::Cut => {
                    trace.cut = true;
                    return Ok(trace);
                }
                Next::Damaged => {
                    return Err(damaged("it has an impossible length", trace.passes.len()))
                }
            }
        }
    }
}
