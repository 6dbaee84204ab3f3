//! One file's header: magic, metadata, tensor table. Every length is checked against the bytes that are there before
//! anything is allocated or followed.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::value::{Array, Value};
use super::{GgufError, Tensor};
use crate::quant::{TypeId, lookup};

/// What a file's header states, checked against the file's own size.
#[derive(Debug)]
pub struct Header {
    /// Container version, 2 or 3.
    pub version: u32,
    /// `general.alignment`, or the default of 32.
    pub alignment: u64,
    /// Key-value pairs in file order.
    pub metadata: Vec<(String, Value)>,
    /// Tensor table in file order.
    pub tensors: Vec<Tensor>,
    /// Where tensor data begins, in bytes from the start of the file.
    pub data_start: u64,
    /// Things that are odd but harmless.
    pub warnings: Vec<String>,
}

/// ggml's limit on tensor axes.
const MAX_DIMS: u32 = 4;
/// ggml's limit on a tensor name is 64; longer ones exist in forks, but kilobytes are damage.
const MAX_NAME: u64 = 1024;
/// Nesting of arrays in arrays: the format allows it, no known file goes beyond one level.
const MAX_NESTING: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
/// Everything before the data. GLM-5's 154,880 tokens, 321,649 merges and 1,809 tensors take 9.5 MB; a length that leads
/// beyond this is damage, and must not become an allocation in a file of hundreds of gigabytes.
const MAX_HEADER: u64 = 64 << 20;

/// Reads the header of the file `path` whose whole content is `bytes`.
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Header, GgufError> {
    let mut c = Cursor { path, bytes, at: 0 };
    magic(path, bytes)?;
    c.at = 4;
    let version = c.u32("the version")?;
    if !(2..=3).contains(&version) {
        let found = if (2..=3).contains(&version.swap_bytes()) {
            format!("{} in big-endian order; only little-endian files are read", version.swap_bytes())
        } else {
            version.to_string()
        };
        return Err(GgufError::Version { path: path.into(), found });
    }
    let tensor_count = c.count("the number of tensors", 8 + 4 + 8 + 4 + 8)?;
    let kv_count = c.count("the number of metadata pairs", 8 + 4 + 1)?;

    let mut warnings = Vec::new();
    let mut metadata = Vec::new();
    let mut keys = HashSet::new();
    let mut alignment = DEFAULT_ALIGNMENT;
    for i in 0..kv_count {
        let offset = c.at;
        let key = c.string(&format!("metadata key {i}"), u64::MAX, None)?;
        let ty = c.u32(&format!("the type of metadata key {key}"))?;
        let value = c.value(&key, ty, &mut warnings)?;
        if !keys.insert(key.clone()) {
            return Err(c.malformed(format!("metadata key {key}"), offset, "each key once", "a second entry"));
        }
        if key == "general.alignment" {
            let good = value.as_u64().filter(|a| a.is_power_of_two() && *a <= 1 << 20);
            alignment = good.ok_or_else(|| {
                c.malformed("general.alignment".into(), offset, "a power of two up to 2^20", &value.to_string())
            })?;
        }
        metadata.push((key, value));
    }

    let entries = (0..tensor_count).map(|i| c.entry(i)).collect::<Result<_, _>>()?;
    let data_start = if tensor_count == 0 { c.at } else { c.at.next_multiple_of(alignment) };
    let tensors = place(path, bytes.len() as u64, alignment, data_start, entries, &mut warnings)?;
    trailing(path, bytes, data_start, alignment, &tensors, &metadata, &mut warnings)?;
    Ok(Header { version, alignment, metadata, tensors, data_start, warnings })
}

/// Checks the magic and says what stands there instead.
fn magic(path: &Path, bytes: &[u8]) -> Result<(), GgufError> {
    if bytes.starts_with(b"GGUF") {
        return Ok(());
    }
    let lead: String = String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned();
    let trimmed = lead.trim_start().to_ascii_lowercase();
    let found = if bytes.is_empty() {
        "an empty file".to_string()
    } else if bytes.starts_with(b"FUGG") {
        "a big-endian GGUF; only little-endian files are read".to_string()
    } else if lead.starts_with("version https://git-lfs") {
        let size = lead.lines().find_map(|l| l.strip_prefix("size ")).unwrap_or("unknown");
        format!("a Git LFS pointer; the model itself has {size} bytes. Fetch it with git lfs pull")
    } else if trimmed.starts_with("<!doctype") || trimmed.starts_with("<html") || trimmed.starts_with('<') {
        "a web page. The link led to a page about the file, not to the file".to_string()
    } else if let Some(part) = byte_split_part(path) {
        format!("what looks like part {part} of a file split by bytes; join the parts with cat first")
    } else {
        let shown: Vec<String> = bytes.iter().take(4).map(|b| format!("{b:02x}")).collect();
        format!("the bytes {}", shown.join(" "))
    };
    Err(GgufError::Magic { path: path.into(), found })
}

/// `name.gguf.part2of3` and `name.gguf-split-b`: the two habits of byte-wise splitting.
fn byte_split_part(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let (_, part) = name.rsplit_once(".part").or_else(|| name.rsplit_once("-split-"))?;
    (!part.ends_with(".gguf")).then(|| part.to_string())
}

/// Turns offsets relative to the data into checked file ranges.
fn place(
    path: &Path,
    file_bytes: u64,
    alignment: u64,
    data_start: u64,
    mut tensors: Vec<Tensor>,
    warnings: &mut Vec<String>,
) -> Result<Vec<Tensor>, GgufError> {
    let mut seen = HashSet::new();
    for t in &mut tensors {
        let (path, tensor, offset, relative) = (path.to_path_buf(), t.name.clone(), t.entry_offset, t.start);
        if !seen.insert(tensor.clone()) {
            return Err(GgufError::DuplicateTensor { other: path.clone(), path, tensor, offset });
        }
        let what = format!("tensor {tensor}, its data offset");
        if !relative.is_multiple_of(alignment) {
            let expected = format!("a multiple of the alignment {alignment}");
            return Err(GgufError::Malformed { path, what, offset, expected, found: relative.to_string() });
        }
        let Some(end) = data_start.checked_add(relative).and_then(|s| s.checked_add(t.bytes)) else {
            let (expected, found) = ("a range below 2^64".into(), format!("{relative} + {}", t.bytes));
            return Err(GgufError::Malformed { path, what, offset, expected, found });
        };
        t.start = data_start + relative;
        if end > file_bytes {
            return Err(GgufError::Cut { path, tensor, start: t.start, end, found: file_bytes });
        }
    }
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_by_key(|t| t.start);
    let mut gaps = 0u64;
    for pair in order.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        let expected = first.start + first.bytes;
        if second.start < expected {
            return Err(GgufError::Overlap {
                path: path.into(),
                first: first.name.clone(),
                second: second.name.clone(),
                expected,
                found: second.start,
            });
        }
        gaps += u64::from(second.start >= expected.next_multiple_of(alignment) + alignment);
    }
    if gaps > 0 {
        warnings.push(format!("{}: {gaps} gaps between tensors hold bytes that no tensor owns", path.display()));
    }
    Ok(tensors)
}

/// What stands behind the last tensor: nothing, padding, or another shard's header.
fn trailing(
    path: &Path,
    bytes: &[u8],
    data_start: u64,
    alignment: u64,
    tensors: &[Tensor],
    metadata: &[(String, Value)],
    warnings: &mut Vec<String>,
) -> Result<(), GgufError> {
    let end = tensors.iter().map(|t| t.start + t.bytes).max().unwrap_or(data_start);
    let padded = end.next_multiple_of(alignment);
    for at in [end, padded] {
        let rest = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
        if rest.starts_with(b"GGUF") {
            let count = metadata.iter().find(|(k, _)| k == "split.count").and_then(|(_, v)| v.as_u64());
            let count = count.map_or("several".into(), |c| c.to_string());
            return Err(GgufError::Concatenated { path: path.into(), offset: at, count });
        }
    }
    let total = bytes.len() as u64;
    if total > padded {
        warnings.push(format!("{}: {} bytes behind the last tensor are not used", path.display(), total - padded));
    }
    Ok(())
}

/// A reading position that never passes the end.
struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: u64,
}

impl Cursor<'_> {
    fn path(&self) -> PathBuf {
        self.path.into()
    }

    fn malformed(&self, what: String, offset: u64, expected: &str, found: &str) -> GgufError {
        GgufError::Malformed { path: self.path(), what, offset, expected: expected.into(), found: found.into() }
    }

    /// Bytes of the header that are left, never beyond [`MAX_HEADER`].
    fn left(&self) -> u64 {
        (self.bytes.len() as u64).min(MAX_HEADER) - self.at
    }

    /// What bounds [`Cursor::left`], for messages.
    fn bound(&self) -> String {
        match self.bytes.len() as u64 > MAX_HEADER {
            true => format!("a header ends within {} MiB", MAX_HEADER >> 20),
            false => format!("the file has {} bytes left", self.left()),
        }
    }

    fn take(&mut self, n: u64, what: &str) -> Result<&[u8], GgufError> {
        if n > self.left() {
            if self.at + self.left() < self.bytes.len() as u64 {
                let expected = format!("at most {} bytes ({})", self.left(), self.bound());
                return Err(self.malformed(what.into(), self.at, &expected, &n.to_string()));
            }
            return Err(GgufError::Truncated {
                path: self.path(),
                what: what.into(),
                offset: self.at,
                expected: n,
                found: self.left(),
            });
        }
        let start = self.at as usize; // at + n <= bytes.len(), which is a usize
        self.at += n;
        Ok(&self.bytes[start..start + n as usize])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of things of which each takes at least `least` bytes: more than fit in the rest of the file is damage.
    fn count(&mut self, what: &str, least: u64) -> Result<u64, GgufError> {
        let offset = self.at;
        let count = self.u64(what)?;
        let most = self.left() / least;
        if count > most {
            let expected = format!("at most {most} ({})", self.bound());
            return Err(self.malformed(what.into(), offset, &expected, &count.to_string()));
        }
        Ok(count)
    }

    /// A string; with `warnings`, bytes that are no UTF-8 are replaced and reported, otherwise refused.
    fn string(&mut self, what: &str, most: u64, warnings: Option<&mut Vec<String>>) -> Result<String, GgufError> {
        let offset = self.at;
        let bytes = self.u64(&format!("the length of {what}"))?;
        if bytes > most {
            let expected = format!("at most {most} bytes");
            return Err(self.malformed(format!("the length of {what}"), offset, &expected, &bytes.to_string()));
        }
        let raw = self.take(bytes, what)?;
        match (std::str::from_utf8(raw), warnings) {
            (Ok(text), _) => Ok(text.to_string()),
            (Err(_), Some(warnings)) => {
                let text = String::from_utf8_lossy(raw).into_owned();
                warnings.push(format!("{}: {what} at offset {offset} is not UTF-8", self.path.display()));
                Ok(text)
            }
            (Err(e), None) => {
                let found = format!("a bad byte after {} good ones", e.valid_up_to());
                Err(self.malformed(what.into(), offset, "UTF-8", &found))
            }
        }
    }

    fn value(&mut self, key: &str, ty: u32, warnings: &mut Vec<String>) -> Result<Value, GgufError> {
        let what = format!("the value of {key}");
        let offset = self.at;
        Ok(match ty {
            0 => Value::U8(self.array::<1>(&what)?[0]),
            1 => Value::I8(i8::from_le_bytes(self.array(&what)?)),
            2 => Value::U16(u16::from_le_bytes(self.array(&what)?)),
            3 => Value::I16(i16::from_le_bytes(self.array(&what)?)),
            4 => Value::U32(self.u32(&what)?),
            5 => Value::I32(i32::from_le_bytes(self.array(&what)?)),
            6 => Value::F32(f32::from_le_bytes(self.array(&what)?)),
            7 => match self.array::<1>(&what)?[0] {
                b @ 0..=1 => Value::Bool(b == 1),
                b => return Err(self.malformed(what, offset, "a bool of 0 or 1", &b.to_string())),
            },
            8 => Value::Str(self.string(&what, u64::MAX, Some(warnings))?),
            9 => Value::Array(self.values(key, 1, warnings)?),
            10 => Value::U64(self.u64(&what)?),
            11 => Value::I64(i64::from_le_bytes(self.array(&what)?)),
            12 => Value::F64(f64::from_le_bytes(self.array(&what)?)),
            other => {
                let what = format!("the type of metadata key {key}");
                return Err(self.malformed(what, offset - 4, "a value type from 0 to 12", &other.to_string()));
            }
        })
    }

    /// A count, and as many elements of at least `least` bytes each.
    fn list<T>(
        &mut self,
        what: &str,
        least: usize,
        mut element: impl FnMut(&mut Self, u64) -> Result<T, GgufError>,
    ) -> Result<Vec<T>, GgufError> {
        (0..self.count(what, least as u64)?).map(|i| element(self, i)).collect()
    }

    fn values(&mut self, key: &str, depth: u32, warnings: &mut Vec<String>) -> Result<Array, GgufError> {
        let offset = self.at;
        let ty = self.u32(&format!("the element type of {key}"))?;
        let (what, elements) = (format!("the length of {key}"), format!("the elements of {key}"));
        macro_rules! plain {
            ($variant:ident, $t:ty) => {
                Array::$variant(self.list(&what, size_of::<$t>(), |c, _| Ok(<$t>::from_le_bytes(c.array(&elements)?)))?)
            };
        }
        Ok(match ty {
            0 => plain!(U8, u8),
            1 => plain!(I8, i8),
            2 => plain!(U16, u16),
            3 => plain!(I16, i16),
            4 => plain!(U32, u32),
            5 => plain!(I32, i32),
            6 => plain!(F32, f32),
            7 => Array::Bool(self.list(&what, 1, |c, _| Ok(c.array::<1>(&elements)? != [0]))?),
            8 => {
                let element = |i| format!("element {i} of {key}");
                Array::Str(self.list(&what, 8, |c, i| c.string(&element(i), u64::MAX, Some(&mut *warnings)))?)
            }
            9 if depth < MAX_NESTING => Array::Array(self.list(&what, 12, |c, _| c.values(key, depth + 1, warnings))?),
            10 => plain!(U64, u64),
            11 => plain!(I64, i64),
            12 => plain!(F64, f64),
            other => {
                let expected = format!("a value type from 0 to 12, arrays nested at most {MAX_NESTING} deep");
                let what = format!("the element type of {key}");
                return Err(self.malformed(what, offset, &expected, &other.to_string()));
            }
        })
    }

    /// An entry of the tensor table, whose start is still relative to the data.
    fn entry(&mut self, i: u64) -> Result<Tensor, GgufError> {
        let entry_offset = self.at;
        let name = self.string(&format!("the name of tensor {i}"), MAX_NAME, None)?;
        let at = self.at;
        let dims = self.u32(&format!("the number of axes of {name}"))?;
        if !(1..=MAX_DIMS).contains(&dims) {
            let what = format!("tensor {name}, its number of axes");
            return Err(self.malformed(what, at, &format!("1 to {MAX_DIMS}"), &dims.to_string()));
        }
        let mut ne = Vec::with_capacity(dims as usize);
        let mut values = 1u64;
        for axis in 0..dims {
            let at = self.at;
            let extent = self.u64(&format!("axis {axis} of {name}"))?;
            let product = values.checked_mul(extent).filter(|p| *p > 0 && *p <= i64::MAX as u64);
            let Some(product) = product else {
                let what = format!("tensor {name}, axis {axis}");
                let expected = "an extent from 1, fewer than 2^63 values in all";
                return Err(self.malformed(what, at, expected, &format!("{extent} after {ne:?}")));
            };
            values = product;
            ne.push(extent);
        }
        let at = self.at;
        let id = self.u32(&format!("the type of {name}"))?;
        let ty = match lookup(id) {
            TypeId::Known(info) => Ok(info),
            TypeId::Removed(old) => Err(format!("one that GGUF has removed (it was {old}); convert the model again")),
            TypeId::Unknown => Err("an unknown one (a fork's private type, or damage)".into()),
        };
        let ty =
            ty.map_err(|found| GgufError::Type { path: self.path(), tensor: name.clone(), offset: at, id, found })?;
        let bytes = ty.row_bytes(ne[0]).and_then(|row| row.checked_mul(values / ne[0]));
        let Some(bytes) = bytes else {
            let what = format!("tensor {name}, axis 0");
            let expected = format!("whole {} blocks of {} values", ty.name, ty.block);
            return Err(self.malformed(what, entry_offset, &expected, &ne[0].to_string()));
        };
        let start = self.u64(&format!("the data offset of {name}"))?;
        Ok(Tensor { name, ne, ty, shard: 0, start, bytes, entry_offset })
    }
}
