//! The bench on which kernels are tried: memory whose every word is known before a launch, launches that are repeated,
//! and what came of them. A kernel must write what it is to write, leave alone what it is not, and do the same thing
//! three times; all of that is looked at here, so that the cases say only what is special to their kernel.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use lockstep_kernels::geometry::{self, Launch};

use super::case::Case;
use crate::device::cuda::format::Format;
use crate::device::cuda::gpu::{Arg, Gpu, GpuError};
use crate::device::cuda::memory::Memory;
use crate::device::cuda::{Rows, Tokens};

/// A NaN with a payload of its own: arithmetic never gives it, so where it stands nothing was written.
pub const POISON: u32 = 0x7fc0_dead;
/// Guard words behind every area.
const GUARD: usize = 64;
/// How often every launch is repeated.
const REPEATS: usize = 3;

/// Memory of the GPU with the words that lie there before a launch, and where its values are among them.
pub struct Area {
    memory: Memory,
    image: Vec<u32>,
    view: View,
}

impl Area {
    /// Address of a word.
    pub fn at(&self, word: usize) -> u64 {
        self.memory.address() + 4 * word as u64
    }

    /// Words from one row to the next.
    pub fn row(&self) -> i64 {
        self.view.row as i64
    }

    /// Its rows as kernels take them.
    pub fn rows(&self) -> Rows {
        Rows { at: self.at(self.view.start), row: self.row(), group: self.view.group as i64 }
    }

    /// The words of its values.
    pub fn words(&self) -> Vec<usize> {
        self.view.words()
    }

    /// The words before a launch, without the guard.
    pub fn image(&self) -> &[u32] {
        &self.image[..self.image.len() - GUARD]
    }
}

/// Columns of rows of groups: value `i` of group `g` of row `t` is word `start + t * row + g * group + i`.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// First word.
    pub start: usize,
    /// Rows.
    pub rows: usize,
    /// Words from one row to the next.
    pub row: usize,
    /// Groups of a row.
    pub groups: usize,
    /// Words from one group to the next.
    pub group: usize,
    /// Values of a group.
    pub width: usize,
}

impl View {
    /// Rows of one group.
    pub fn plain(rows: usize, width: usize, row: usize) -> Self {
        View { start: 0, rows, row, groups: 1, group: 0, width }
    }

    /// Rows of groups, with a gap behind each group and a rest behind each row.
    pub fn groups(rows: usize, groups: usize, width: usize, gap: usize, rest: usize) -> Self {
        let group = width + gap;
        View { start: 0, rows, row: groups * group + rest, groups, group, width }
    }

    /// Every word, row by row and group by group.
    pub fn words(&self) -> Vec<usize> {
        let mut words = Vec::with_capacity(self.rows * self.groups * self.width);
        for t in 0..self.rows {
            for g in 0..self.groups {
                let first = self.start + t * self.row + g * self.group;
                words.extend(first..first + self.width);
            }
        }
        words
    }

    /// Words of an area that holds every row whole.
    pub fn extent(&self) -> usize {
        self.start + self.rows * self.row.max(self.groups.saturating_sub(1) * self.group + self.width)
    }

    /// `values` (`[rows][groups][width]`) at their words, poison everywhere else.
    pub fn place(&self, values: &[f32]) -> Vec<u32> {
        let mut image = vec![POISON; self.extent()];
        for (word, v) in self.words().into_iter().zip(values) {
            image[word] = v.to_bits();
        }
        image
    }
}

/// What a kernel takes as a parameter.
pub trait Given {
    /// The parameter: of an area its address, of a size 32 bits, the rest as it is.
    fn given(&self) -> Box<dyn Arg>;
}

impl<T: Arg + Copy + 'static> Given for T {
    fn given(&self) -> Box<dyn Arg> {
        Box::new(*self)
    }
}

impl Given for usize {
    fn given(&self) -> Box<dyn Arg> {
        Box::new(*self as i32)
    }
}

impl Given for Area {
    fn given(&self) -> Box<dyn Arg> {
        Box::new(self.at(0))
    }
}

/// A kernel's parameters, in its order.
macro_rules! given {
    ($($value:expr),*) => {
        vec![$(crate::verify::kernels::lab::Given::given(&$value)),*]
    };
}
pub(super) use given;

/// The words of areas after a launch.
pub struct Seen {
    images: Vec<Vec<u32>>,
    /// Where the repeats differ.
    differs: Option<String>,
}

impl Seen {
    /// The words of area `index`, all of them, without any judgement.
    pub fn words(&self, index: usize) -> &[u32] {
        &self.images[index][..self.images[index].len() - GUARD]
    }

    /// What was written to `words` of area `index`; problems where one of them was not, or any other was.
    pub fn take(&self, case: &mut Case, what: &str, index: usize, area: &Area, words: &[usize]) -> Vec<u32> {
        if let Some(differs) = &self.differs {
            case.unstable(format!("{what}: {differs}"));
        }
        let image = &self.images[index];
        let mut free = vec![false; image.len()];
        for word in words {
            free[*word] = true;
            if image[*word] == POISON {
                case.problem(format!("{what}: word {word} was not written"));
                break;
            }
        }
        let touched = (0..image.len()).find(|i| !free[*i] && image[*i] != area.image[*i]);
        if let Some(word) = touched {
            let (before, after) = (f32::from_bits(area.image[word]), f32::from_bits(image[word]));
            case.problem(format!("{what}: word {word} is not the kernel's to write: was {before}, is {after}"));
        }
        words.iter().map(|word| image[*word]).collect()
    }

    /// As [`Seen::take`], as integers.
    pub fn ints(&self, case: &mut Case, what: &str, index: usize, area: &Area, words: &[usize]) -> Vec<i32> {
        self.take(case, what, index, area, words).into_iter().map(|w| w as i32).collect()
    }

    /// As [`Seen::take`], as numbers.
    pub fn floats(&self, case: &mut Case, what: &str, index: usize, area: &Area, words: &[usize]) -> Vec<f32> {
        self.take(case, what, index, area, words).into_iter().map(f32::from_bits).collect()
    }
}

/// A step's inputs on the GPU, and what keeps them there.
pub struct Step {
    /// As kernels take them.
    pub tokens: Tokens,
    _kept: Area,
}

/// The bench. What it does fails with what the GPU says: too little memory, a launch that the driver refuses.
pub struct Lab<'a> {
    /// The GPU.
    pub gpu: &'a Arc<Gpu>,
    /// Ranks that the model is run with: one of the orders of summation.
    pub tp: usize,
    launched: RefCell<BTreeSet<Launched>>,
}

/// A kernel, and its format where it has one.
type Launched = (&'static str, Option<Format>);

impl<'a> Lab<'a> {
    /// An empty bench.
    pub fn new(gpu: &'a Arc<Gpu>, tp: usize) -> Self {
        Lab { gpu, tp, launched: RefCell::default() }
    }

    /// Every kernel that was launched so far.
    pub fn launched(&self) -> BTreeSet<Launched> {
        self.launched.borrow().clone()
    }

    /// An area with these words.
    pub fn words(&self, image: Vec<u32>) -> Result<Area, GpuError> {
        self.area(View::plain(1, image.len(), image.len()), image)
    }

    fn area(&self, view: View, mut image: Vec<u32>) -> Result<Area, GpuError> {
        image.extend([POISON; GUARD]);
        let memory = Memory::new(self.gpu, 4 * image.len())?;
        memory.upload(0, &image)?;
        Ok(Area { memory, image, view })
    }

    /// An area with these values at a view's words.
    pub fn placed(&self, view: View, values: &[f32]) -> Result<Area, GpuError> {
        self.area(view, view.place(values))
    }

    /// An area of poison with room for a view's values.
    pub fn room(&self, view: View) -> Result<Area, GpuError> {
        self.placed(view, &[])
    }

    /// An area with these values, side by side.
    pub fn floats(&self, values: &[f32]) -> Result<Area, GpuError> {
        self.words(values.iter().map(|v| v.to_bits()).collect())
    }

    /// An area with these values, side by side.
    pub fn ints(&self, values: &[i32]) -> Result<Area, GpuError> {
        self.words(values.iter().map(|v| *v as u32).collect())
    }

    /// An area with these bytes, filled up with poison.
    pub fn bytes(&self, bytes: &[u8]) -> Result<Area, GpuError> {
        self.words(words_of(bytes))
    }

    /// An area of poison.
    pub fn poisoned(&self, words: usize) -> Result<Area, GpuError> {
        self.words(vec![POISON; words])
    }

    /// A step's inputs. `tables` has `pages` entries per sequence.
    pub fn step(
        &self,
        positions: &[i32],
        sequences: &[i32],
        tables: &[i32],
        pages: usize,
        page: usize,
    ) -> Result<Step, GpuError> {
        let n = positions.len();
        let kept = self.ints(&[positions, positions, sequences, tables].concat())?;
        let tokens = Tokens {
            id: kept.at(0),
            position: kept.at(n),
            sequence: kept.at(2 * n),
            tables: kept.at(3 * n),
            pages: pages as i32,
            page: page as i32,
        };
        Ok(Step { tokens, _kept: kept })
    }

    /// One launch of a kernel, of a format where its unit has them.
    pub fn launch(
        &self,
        unit: &'static str,
        format: Option<Format>,
        kernel: &'static str,
        launch: Launch,
        args: &[Box<dyn Arg>],
    ) -> Result<(), GpuError> {
        self.gpu.launch(unit, format, kernel, launch, &args.iter().map(|arg| &**arg).collect::<Vec<_>>())?;
        self.launched.borrow_mut().insert((kernel, format));
        Ok(())
    }

    /// One launch of a kernel of rows.cu over `count` values.
    pub fn each(&self, kernel: &'static str, count: usize, args: &[Box<dyn Arg>]) -> Result<(), GpuError> {
        self.launch("rows", None, kernel, geometry::each(count), args)
    }

    /// As [`Lab::thrice`] for a kernel that writes the values of one area, which come back.
    pub fn values(
        &self,
        case: &mut Case,
        what: &str,
        out: &Area,
        go: &dyn Fn() -> Result<(), GpuError>,
    ) -> Result<Vec<f32>, GpuError> {
        Ok(self.thrice(&[out], go)?.floats(case, what, 0, out, &out.words()))
    }

    /// Puts the areas back to their first words and runs `go`, three times; their words afterwards.
    pub fn thrice(&self, outs: &[&Area], go: &dyn Fn() -> Result<(), GpuError>) -> Result<Seen, GpuError> {
        let mut seen = Seen { images: Vec::new(), differs: None };
        for repeat in 0..REPEATS {
            for area in outs {
                area.memory.upload(0, &area.image)?;
            }
            go()?;
            let mut images = Vec::with_capacity(outs.len());
            for area in outs {
                let mut image = vec![0u32; area.image.len()];
                area.memory.download(0, &mut image, &|| "a kernel under test".into())?;
                images.push(image);
            }
            if repeat == 0 {
                seen.images = images;
                continue;
            }
            let parts = |(a, b): (&Vec<u32>, &Vec<u32>)| a.iter().zip(b).position(|(a, b)| a != b);
            if let Some((area, word)) =
                seen.images.iter().zip(&images).enumerate().find_map(|(i, pair)| Some((i, parts(pair)?)))
            {
                let (first, now) = (seen.images[area][word], images[area][word]);
                let text = format!("run {} gave {now:#010x} at word {word}, the first gave {first:#010x}", repeat + 1);
                seen.differs.get_or_insert(text);
            }
        }
        Ok(seen)
    }
}

/// Bytes as words, filled up with poison.
pub fn words_of(bytes: &[u8]) -> Vec<u32> {
    let fill = POISON.to_le_bytes();
    let word = |c: &[u8]| std::array::from_fn(|i| c.get(i).copied().unwrap_or(fill[i]));
    bytes.chunks(4).map(|c| u32::from_le_bytes(word(c))).collect()
}

/// Words as bytes.
pub fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_place_values_and_nothing_else() {
        let view = View { start: 1, rows: 2, row: 7, groups: 2, group: 3, width: 2 };
        assert_eq!(view.words(), [1, 2, 4, 5, 8, 9, 11, 12]);
        let image = view.place(&[1.0; 8]);
        assert_eq!(image.len(), 15);
        assert_eq!(image.iter().filter(|w| **w == POISON).count(), 7);
    }

    #[test]
    fn bytes_and_words_are_the_same() {
        let bytes = [1u8, 2, 3, 4, 5];
        let words = words_of(&bytes);
        assert_eq!(words.len(), 2);
        assert_eq!(bytes_of(&words)[..5], bytes);
        assert_eq!(bytes_of(&words)[5..], POISON.to_le_bytes()[1..]);
    }
}
