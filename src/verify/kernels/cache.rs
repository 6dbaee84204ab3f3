//! A paged cache as attention and the indexer read it: pages in any order, empty ones and the ends of full ones poisoned,
//! so that a key which is not there shows. And `append`, which fills it.

use super::case::{Case, check};
use super::lab::{Area, Lab, POISON, Step, View, given};
use super::random::Random;
use crate::device::cuda::gpu::GpuError;
use crate::engine::kv::PAGE;
use crate::report::Check;

/// Sequences of random key rows.
pub struct Cache {
    /// Values of a row.
    pub width: usize,
    /// Tokens of a page.
    pub page: usize,
    /// Key rows of each sequence.
    pub rows: Vec<Vec<f32>>,
    /// The pages.
    pub area: Area,
    tables: Vec<i32>,
    pages: usize,
}

impl Cache {
    /// Sequences of so many keys, and a few pages that belong to nobody.
    pub fn random(lab: &Lab<'_>, name: &str, width: usize, page: usize, contexts: &[usize]) -> Result<Self, GpuError> {
        let mut random = Random::of(name);
        let rows: Vec<Vec<f32>> = contexts.iter().map(|n| random.values(n * width)).collect();
        Cache::of(lab, name, width, page, rows)
    }

    /// The given rows.
    pub fn of(lab: &Lab<'_>, name: &str, width: usize, page: usize, rows: Vec<Vec<f32>>) -> Result<Self, GpuError> {
        const SPARE: usize = 3;
        let needed: Vec<usize> = rows.iter().map(|r| (r.len() / width).div_ceil(page)).collect();
        let total = needed.iter().sum::<usize>() + SPARE;
        let pages = needed.iter().max().map_or(0, |n| n + 2);
        let mut order = Random::of(&format!("pages {name}")).shuffled(total).into_iter();
        // Entries behind the last page point to one that holds nothing.
        let empty = order.next().unwrap_or(0) as i32;
        let mut tables = vec![empty; rows.len() * pages];
        let mut image = vec![POISON; total * page * width];
        for (sequence, (keys, needed)) in rows.iter().zip(&needed).enumerate() {
            let own: Vec<usize> = order.by_ref().take(*needed).collect();
            for (i, (physical, keys)) in own.iter().zip(keys.chunks(page * width)).enumerate() {
                tables[sequence * pages + i] = *physical as i32;
                let first = physical * page * width;
                image[first..first + keys.len()].iter_mut().zip(keys).for_each(|(to, v)| *to = v.to_bits());
            }
        }
        Ok(Cache { width, page, rows, area: lab.words(image)?, tables, pages })
    }

    /// Inputs of a step: (sequence, position) per token, position -1 for padding.
    pub fn step(&self, lab: &Lab<'_>, tokens: &[(usize, i32)]) -> Result<Step, GpuError> {
        let positions: Vec<i32> = tokens.iter().map(|t| t.1).collect();
        // Padding has sequence 0 in the engine; here it names none, which nobody may look up.
        let sequences: Vec<i32> = tokens.iter().map(|t| if t.1 < 0 { -1 } else { t.0 as i32 }).collect();
        lab.step(&positions, &sequences, &self.tables, self.pages, self.page)
    }

    /// A key row.
    pub fn key(&self, sequence: usize, position: usize) -> &[f32] {
        &self.rows[sequence][position * self.width..(position + 1) * self.width]
    }

    fn word(&self, sequence: usize, position: usize) -> usize {
        let physical = self.tables[sequence * self.pages + position / self.page] as usize;
        (physical * self.page + position % self.page) * self.width
    }
}

/// `append`.
pub fn run(lab: &Lab<'_>, width: usize, out: &mut Vec<Check>) {
    out.push(check("append", |case| {
        for (width, page) in [(width, PAGE), (37, 5), (1, 1)] {
            append(lab, case, width, page)?;
        }
        Ok(())
    }));
}

fn append(lab: &Lab<'_>, case: &mut Case, width: usize, page: usize) -> Result<(), GpuError> {
    // A token per place: first and last of a page, next to one another, in two sequences, and padding.
    let cache = Cache::random(lab, "append", width, page, &[3 * page + 2, page])?;
    let last = page as i32 - 1;
    let tokens =
        [(0, 0), (1, 0), (0, -1), (0, 3 * page as i32), (1, last), (1, -1), (0, 3 * page as i32 + 1), (0, last + 1)];
    // Places that two tokens share would be written twice.
    let mut seen = std::collections::BTreeSet::new();
    let tokens: Vec<(usize, i32)> = tokens.into_iter().filter(|t| t.1 < 0 || seen.insert(*t)).collect();
    let (n, step) = (tokens.len(), cache.step(lab, &tokens)?);
    let x = Random::of("appended").values(n * width);
    let area = lab.placed(View::plain(n, width, width + 3), &x)?;
    let args = given![cache.area, width, area, area.row(), step.tokens, n];
    let seen = lab.thrice(&[&cache.area], &|| lab.each("append", n * width, &args))?;
    let (mut words, mut expected) = (Vec::new(), Vec::new());
    for (t, (sequence, position)) in tokens.iter().enumerate().filter(|(_, t)| t.1 >= 0) {
        let first = cache.word(*sequence, *position as usize);
        words.extend(first..first + width);
        expected.extend_from_slice(&x[t * width..(t + 1) * width]);
    }
    let what = format!("{n} rows of {width}, pages of {page}");
    let found = seen.floats(case, &what, 0, &cache.area, &words);
    case.same(&what, &found, &expected);
    Ok(())
}
