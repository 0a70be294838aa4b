//! Writing a GGUF model, in one file or in parts, tensor by tensor.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::disk::PartialFile;
use crate::error::Error;
use crate::gguf::{Header, TensorInfo, Value};

/// Told after each tensor: bytes of tensor data written so far and in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// The names of a model's files: `out` itself, or llama.cpp's names for parts.
pub fn part_names(out: &Path, parts: u32) -> Vec<PathBuf> {
    if parts <= 1 {
        return vec![out.to_path_buf()];
    }
    let stem = out.file_stem().unwrap_or_default().to_string_lossy();
    (1..=parts)
        .map(|part| out.with_file_name(format!("{stem}-{part:05}-of-{parts:05}.gguf")))
        .collect()
}

/// Cuts the tensors, in order, into `parts` runs of about equal size, none empty.
fn cut(tensors: &[TensorInfo], parts: u32) -> Vec<std::ops::Range<usize>> {
    let total: u64 = tensors.iter().map(|t| t.bytes() as u64).sum();
    let mut ranges = Vec::new();
    let (mut start, mut done) = (0, 0u64);
    for part in 0..parts as usize {
        let still_to_come = parts as usize - part - 1;
        let goal = total * (part as u64 + 1) / u64::from(parts);
        let mut end = start;
        while end < tensors.len() - still_to_come && (end == start || done < goal) {
            done += tensors[end].bytes() as u64;
            end += 1;
        }
        if still_to_come == 0 {
            end = tensors.len();
        }
        ranges.push(start..end);
        start = end;
    }
    ranges
}

/// Writes a model: the key-value pairs of `values`, then each tensor as `fill` (given
/// the tensor's index) supplies it. Returns the names of the files.
///
/// The files appear under their names only when all of them are complete.
///
/// # Errors
/// When there are more parts than tensors, when the disk refuses, or when `fill` fails.
pub fn write_model(
    out: &Path,
    values: &Header,
    tensors: &[TensorInfo],
    parts: u32,
    mut fill: impl FnMut(usize, &mut PartialFile) -> Result<(), Error>,
    progress: Progress,
) -> Result<Vec<PathBuf>, Error> {
    if parts == 0 || parts as usize > tensors.len() || parts > u32::from(u16::MAX) {
        return Err(Error::Usage(format!(
            "cannot split {} tensors into {parts} parts; use 1 to {}",
            tensors.len(),
            tensors.len()
        )));
    }
    let total: u64 = tensors.iter().map(|t| t.bytes() as u64).sum();
    let mut done = 0;
    let mut files = Vec::new();
    for (part, (range, name)) in
        cut(tensors, parts).into_iter().zip(part_names(out, parts)).enumerate()
    {
        let mut header = Header::default();
        if part == 0 {
            header.copy_values(values);
        }
        if parts > 1 {
            header.set("split.no", &Value::U16(part as u16));
            header.set("split.count", &Value::U16(parts as u16));
            header.set("split.tensors.count", &Value::I32(tensors.len() as i32));
        }
        for tensor in &tensors[range.clone()] {
            header.add_tensor(tensor);
        }
        let meta = header.to_bytes();
        let start = meta.len() as u64;
        let last = range.len() - 1;
        let end = start + header.data_offset(last) + tensors[range.end - 1].bytes() as u64;
        // ggml pads the last tensor too.
        let end = end.next_multiple_of(header.alignment());
        let mut file = PartialFile::create(&name, end)?;
        file.write(&meta)?;
        for (local, index) in range.enumerate() {
            file.pad_to(start + header.data_offset(local))?;
            let before = file.position();
            fill(index, &mut file)?;
            let bytes = tensors[index].bytes() as u64;
            assert_eq!(file.position() - before, bytes, "{}", tensors[index].name);
            done += bytes;
            progress(done, total);
        }
        file.pad_to(end)?;
        files.push(file);
    }
    files.into_iter().map(PartialFile::publish).collect()
}

/// A model on disk, in one file or in parts, whose tensors can be read.
pub struct StoredModel {
    /// The header of the (first) file.
    pub header: Header,
    /// All tensors, those of the first file first.
    pub tensors: Vec<TensorInfo>,
    /// For each tensor its file and the offset of its data.
    places: Vec<(PathBuf, u64)>,
}

impl StoredModel {
    /// Reads the headers of the model whose (first) file is `path`.
    ///
    /// # Errors
    /// When a file is missing or no GGUF, or `path` is a part but not the first.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let header = Header::open(path)?;
        let mut model = Self { header, tensors: Vec::new(), places: Vec::new() };
        let parts = model.header.get_integer("split.count").unwrap_or(1).max(1);
        let mut names = vec![path.to_path_buf()];
        if parts > 1 {
            let name = path.to_string_lossy();
            let prefix = name.strip_suffix(&format!("-00001-of-{parts:05}.gguf"));
            let prefix = prefix.ok_or_else(|| {
                Error::bad_model(path, format!("one of {parts} parts; give the first of them"))
            })?;
            names = part_names(Path::new(&format!("{prefix}.gguf")), parts);
        }
        for name in names {
            let header = Header::open(&name)?;
            for (index, info) in header.tensors().into_iter().enumerate() {
                model.tensors.push(info);
                model.places.push((name.clone(), header.file_offset(index)));
            }
        }
        Ok(model)
    }

    /// The position of a tensor in [`Self::tensors`].
    pub fn position(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|t| t.name == name)
    }

    /// The data of tensor `index`.
    ///
    /// # Errors
    /// When the file ends before the tensor does, or cannot be read.
    pub fn read(&self, index: usize) -> Result<Vec<u8>, Error> {
        let (path, offset) = &self.places[index];
        let mut bytes = vec![0u8; self.tensors[index].bytes()];
        File::open(path)
            .and_then(|file| file.read_exact_at(&mut bytes, *offset))
            .map_err(|e| Error::read(path, e))?;
        Ok(bytes)
    }

    /// The values of tensor `index` as floats.
    ///
    /// # Errors
    /// As for [`Self::read`].
    pub fn floats(&self, index: usize) -> Result<Vec<f32>, Error> {
        Ok(self.tensors[index].ty.decode(&self.read(index)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::TensorType;

    fn tensors(rows: &[u64]) -> Vec<TensorInfo> {
        rows.iter()
            .enumerate()
            .map(|(i, n)| TensorInfo { name: format!("t{i}"), ty: TensorType::F32, ne: vec![*n] })
            .collect()
    }

    #[test]
    fn every_part_gets_a_tensor_and_every_tensor_a_part() {
        for (rows, parts) in [(vec![1000, 1, 1], 3), (vec![1, 1, 1000], 3), (vec![5; 10], 4)] {
            let ranges = cut(&tensors(&rows), parts);
            assert_eq!(ranges.len(), parts as usize);
            assert!(ranges.iter().all(|r| !r.is_empty()), "{ranges:?}");
            assert_eq!(ranges[0].start, 0);
            assert!(ranges.windows(2).all(|w| w[0].end == w[1].start));
            assert_eq!(ranges.last().unwrap().end, rows.len());
        }
    }

    #[test]
    fn one_part_keeps_the_name_and_more_follow_llama_cpp() {
        assert_eq!(part_names(Path::new("/x/m.gguf"), 1), [Path::new("/x/m.gguf")]);
        assert_eq!(part_names(Path::new("/x/m.gguf"), 2)[1], Path::new("/x/m-00002-of-00002.gguf"));
    }

    #[test]
    fn tensor_data_lies_where_the_header_says() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m.gguf");
        let infos = tensors(&[3, 5, 2]);
        let names = write_model(
            &out,
            &Header::default(),
            &infos,
            2,
            |i, file| file.write(&vec![i as u8 + 1; infos[i].bytes()]),
            &mut |_, _| (),
        )
        .unwrap();
        assert_eq!(names.len(), 2);
        let model = StoredModel::open(&names[0]).unwrap();
        let seen: Vec<_> =
            (0..3).map(|i| (model.tensors[i].name.clone(), model.read(i).unwrap())).collect();
        let expected = [("t0", vec![1; 12]), ("t1", vec![2; 20]), ("t2", vec![3; 8])];
        assert_eq!(seen, expected.map(|(n, b)| (n.to_string(), b)));
        // The same without the reader: the data of t1 lies behind the second header or the first.
        let found = names
            .iter()
            .any(|name| std::fs::read(name).unwrap().windows(20).any(|window| window == [2; 20]));
        assert!(found);
        let error = StoredModel::open(&names[1]).err().unwrap().to_string();
        assert!(error.contains("give the first"), "{error}");
    }

    #[test]
    fn a_failing_tensor_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let infos = tensors(&[3, 5]);
        let result = write_model(
            &dir.path().join("m.gguf"),
            &Header::default(),
            &infos,
            2,
            |i, file| match i {
                0 => file.write(&[0; 12]),
                _ => Err(Error::Usage("no".into())),
            },
            &mut |_, _| (),
        );
        assert!(result.is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
